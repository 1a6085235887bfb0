"""A small U-Net learns to remove noise from pictures, as diffusion models do. Start it with:
tatami run -n 3 examples/unet.py"""

import torch
import torch.nn.functional as F
from torch import nn

import tatami
from tatami.datasets import load

BATCH, STEPS, CHANNELS = 64, 60, 16


class UNet(nn.Module):
    """Maps (samples, 1, 8, 8) pictures and (samples,) noise levels to the noise in the pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, CHANNELS))
        self.first = nn.Conv2d(1, CHANNELS, 3, padding=1)
        self.down = nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, stride=2, padding=1)
        self.deep = nn.Conv2d(2 * CHANNELS, 2 * CHANNELS, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * CHANNELS, CHANNELS, 2, stride=2)
        self.norm = nn.GroupNorm(4, 2 * CHANNELS)
        self.last = nn.Conv2d(2 * CHANNELS, 1, 3, padding=1)

    def forward(self, pictures: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        high = F.silu(self.first(pictures) + self.level(levels[:, None])[:, :, None, None])
        low = F.silu(self.deep(F.silu(self.down(high))))
        noise: torch.Tensor = self.last(F.silu(self.norm(torch.cat([high, self.up(low)], dim=1))))
        return noise


comm = tatami.init()
torch.manual_seed(0)  # the same pictures and noise on every rank
pictures = load("digits").x.view(-1, 1, 8, 8) * 2 - 1
sample = (pictures[:4], torch.rand(4))
model = tatami.tile(UNet(), comm, batch_size=BATCH, sample=sample, speeds="equal", reduction="mean")
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

for step in range(STEPS):
    clean = pictures[torch.randint(len(pictures), (BATCH,))]
    noise, levels = torch.randn_like(clean), torch.rand(BATCH)
    mixed = (1 - levels).sqrt()[:, None, None, None] * clean + levels.sqrt()[:, None, None, None] * noise
    mixed, levels, noise = model.local(mixed, levels, noise)  # the global batch in, this rank's samples out
    optimizer.zero_grad()
    loss = F.mse_loss(model(mixed, levels), noise)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    whole = model.global_loss(loss)
    if step % 20 == 19 and comm.rank == 0:
        print(f"step {step + 1}: loss {whole:.3f} (predicting zeros gives 1.0)")
