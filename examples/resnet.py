"""Trains a ResNet-18 with batch normalization on ranks of unequal speed. Start it with:  tatami run -n 2 examples/resnet.py"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

import tatami

WIDTH, SIZE, CLASSES, BATCH, STEPS = 8, 16, 4, 24, 30  # the ResNet-18 of the paper has width 64, images of 224, 1,000 classes


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        result: torch.Tensor = F.relu(y + self.shortcut(x))
        return result


class ResNet18(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [WIDTH, WIDTH, 2 * WIDTH, 4 * WIDTH, 8 * WIDTH]
        self.stem = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU())
        stages = [[Residual(a, b, 1 if a == b else 2), Residual(b, b, 1)] for a, b in pairwise(widths)]
        self.stages = nn.Sequential(*(block for stage in stages for block in stage))
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return result


def draw(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw noisy images with stripes in one of four directions, which is the class."""
    labels = torch.randint(CLASSES, (count,), generator=generator)
    down, right = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    stripes = torch.stack([((place // 2) % 2).float() for place in (down, right, down + right, down - right)])
    return stripes[labels].unsqueeze(1) + 0.5 * torch.randn(count, 3, SIZE, SIZE, generator=generator), labels


comm = tatami.init()
torch.manual_seed(0)
images, labels = draw(BATCH * STEPS, torch.Generator().manual_seed(1))  # the same on every rank, like the weights
model = tatami.tile(ResNet18(), comm, batch_size=BATCH, sample=images[:4], speeds="measure", reduction="mean")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for step in range(STEPS):
    chosen = slice(step * BATCH, (step + 1) * BATCH)
    x, y = model.local(images[chosen], labels[chosen])  # the global batch in, this rank's samples out
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)  # batch normalization takes the statistics of the global batch
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()

model.eval()
images, labels = draw(64, torch.Generator().manual_seed(2))
with torch.no_grad():
    right = (model(images).argmax(1) == labels).float().mean()
if comm.rank == 0:
    print(f"accuracy {100 * right.item():.1f}% on unseen images")
