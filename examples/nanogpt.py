"""Trains a GPT on ranks of unequal speed, tiled by one line. Start it with:  tatami run -n 3 examples/nanogpt.py"""

import pydoc_data.topics

import torch
import torch.nn.functional as F
from torch import nn

import tatami

LAYERS, HEADS, WIDTH, TOKENS, BATCH, STEPS = 2, 6, 48, 32, 16, 60
TEXT = "".join(pydoc_data.topics.topics.values())  # the language reference, which every Python has
LETTERS = sorted(set(TEXT))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = (part.view(batch, tokens, HEADS, -1).transpose(1, 2) for part in self.qkv(x).split(WIDTH, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        return result


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = Attention()
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        result: torch.Tensor = x + self.perceptron(self.norms[1](x))
        return result


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, len(LETTERS))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        assert text.shape[1] <= TOKENS
        result: torch.Tensor = self.head(self.layers(self.letters(text) + self.places(torch.arange(text.shape[1]))))
        return result


comm = tatami.init()
torch.manual_seed(0)
numbers = {letter: number for number, letter in enumerate(LETTERS)}
text = torch.tensor([numbers[letter] for letter in TEXT])
starts = torch.randint(len(text) - TOKENS - 1, (STEPS, BATCH))  # the same on every rank, like the weights
first = torch.stack([text[start : start + TOKENS] for start in starts[0]])
model = tatami.tile(GPT(), comm, batch_size=BATCH, sample=first, speeds="measure", reduction="mean")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step, chosen in enumerate(starts):
    window = torch.stack([text[start : start + TOKENS + 1] for start in chosen])
    x, y = model.local(window[:, :-1], window[:, 1:])  # the global batch in, this rank's samples out
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()  # type: ignore[no-untyped-call]  # every .grad now holds the gradient over the global batch
    optimizer.step()
    if step % 20 == 19:
        whole = model.global_loss(loss)  # over all samples, the same on all ranks; loss is over this rank's samples, if any
        if comm.rank == 0:
            print(f"step {step + 1}: loss {whole:.2f}")
