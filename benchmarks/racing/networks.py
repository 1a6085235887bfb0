"""The networks that the contestants train: the same weights and the same global batch on every rank.

Small ones, so that hosts that share two cores do the real work in time. What decides who wins is the ratio of what a sample
computes to what its weights weigh, and that is the ratio of a large network with as many tokens or pixels in a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tatami.cli.tasks import CharacterGpt, NextTokenLoss

_CHARACTERS, _CLASSES = 96, 10
_SIDE, _PATCH = 28, 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """A network, its loss and its global batch.

    Attributes:
        model: the plain network, with weights of seed 0.
        x, y: the global batch, (samples, ...).
        loss: the mean over samples.
        pieces: the same modules in the order of the forward pass: what a pipeline can be cut between.
        batch_norm: whether it normalizes over the batch.
        corners: whether its activations have corners: an input that rounding moves across that of a ReLU changes gradients by
            a part, not by rounding.
    """

    model: nn.Module
    x: torch.Tensor
    y: torch.Tensor
    loss: nn.Module
    pieces: Callable[[Any], list[nn.Module]]
    batch_norm: bool = False
    corners: bool = False


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a network of the grid is made with.

    Attributes:
        samples: of the global batch.
        dilation: how many times as long all takes in a paced lab of 2, 4 and 8 hosts.
        repeats: iterations of one timing.
        shape: the keyword arguments of its function in `NETWORKS`.
    """

    samples: int
    dilation: dict[int, float]
    repeats: int = 1
    shape: dict[str, int] = field(default_factory=dict)


_USUAL = {2: 2.0, 4: 4.0, 8: 16.0}
SIZES = {
    "gpt": Sizes(samples=32, dilation=_USUAL, shape={"layers": 6, "width": 80, "heads": 4, "tokens": 48}),
    "llama": Sizes(samples=32, dilation=_USUAL, shape={"layers": 6, "width": 80, "heads": 4, "groups": 2, "tokens": 48}),
    "resnet": Sizes(samples=32, dilation=_USUAL, shape={"width": 16}),
    "vit": Sizes(samples=32, dilation=_USUAL, shape={"layers": 6, "width": 80, "heads": 4}),
    "perceptron": Sizes(samples=1024, dilation={2: 20.0, 4: 30.0, 8: 40.0}, repeats=3),
}


def make(name: str, *, samples: int, shape: dict[str, int]) -> Network:
    """The network of this name; every call makes one with the same weights and the same batch."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return NETWORKS[name](samples, torch.Generator().manual_seed(0), **shape)


def _tokens(samples: int, tokens: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = (torch.randint(0, _CHARACTERS, (samples, tokens), generator=generator) for _ in range(2))
    return x, y


def _images(samples: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(samples, 3, _SIDE, _SIDE, generator=generator)
    return x, torch.randint(0, _CLASSES, (samples,), generator=generator)


def _gpt(samples: int, generator: torch.Generator, *, layers: int, width: int, heads: int, tokens: int) -> Network:
    x, y = _tokens(samples, tokens, generator)
    model = CharacterGpt(characters=_CHARACTERS, layers=layers, width=width, heads=heads, tokens=tokens)

    def pieces(whole: CharacterGpt) -> list[nn.Module]:
        *own, norm = whole.layers
        return [_Embedded(whole.characters, whole.places), *own, nn.Sequential(norm, whole.head)]

    return Network(model=model, x=x, y=y, loss=NextTokenLoss(), pieces=pieces)


class _Embedded(nn.Module):
    def __init__(self, characters: nn.Embedding, places: nn.Embedding) -> None:
        super().__init__()
        self.characters, self.places = characters, places

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.characters(text) + self.places(torch.arange(text.shape[1], device=text.device))
        return result


class _LlamaLayer(nn.Module):
    """Grouped attention with rotary positions, and a gated perceptron, each of an RMS norm of its input."""

    def __init__(self, *, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        hidden = 8 * width // 3 // 8 * 8
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attention(self.norm1(x))
        z = self.norm2(x)
        result: torch.Tensor = x + self.down(F.silu(self.gate(z)) * self.up(z))
        return result

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        b, t, width = x.shape
        places = torch.arange(t, device=x.device, dtype=x.dtype)[:, None]
        rates = 10000.0 ** (-torch.arange(0, self.size, 2, device=x.device, dtype=x.dtype) / self.size)
        angle = (places * rates).repeat(1, 2)
        cos, sin = angle.cos(), angle.sin()
        q, k, v = (each.view(b, t, -1, self.size).transpose(1, 2) for each in (self.q(x), self.k(x), self.v(x)))
        q, k = (each * cos + torch.cat((-each.chunk(2, -1)[1], each.chunk(2, -1)[0]), -1) * sin for each in (q, k))
        repeats = self.heads // self.groups
        k, v = (
            each[:, :, None].expand(b, self.groups, repeats, t, self.size).reshape(b, self.heads, t, self.size)
            for each in (k, v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.o(y.transpose(1, 2).reshape(b, t, width))
        return result


class _Llama(nn.Module):
    def __init__(self, *, layers: int, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(_CHARACTERS, width)
        self.layers = nn.ModuleList([_LlamaLayer(width=width, heads=heads, groups=groups) for _ in range(layers)])
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, _CHARACTERS, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.characters(text)
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(self.norm(x))
        return result


def _llama(
    samples: int, generator: torch.Generator, *, layers: int, width: int, heads: int, groups: int, tokens: int
) -> Network:
    x, y = _tokens(samples, tokens, generator)

    def pieces(whole: _Llama) -> list[nn.Module]:
        return [whole.characters, *whole.layers, nn.Sequential(whole.norm, whole.head)]

    model = _Llama(layers=layers, width=width, heads=heads, groups=groups)
    return Network(model=model, x=x, y=y, loss=NextTokenLoss(), pieces=pieces)


class _Residual(nn.Module):
    """ResNet's basic block."""

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


class _Pooled(nn.Module):
    """The mean over all places, then a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x.mean((2, 3)))
        return result


def _resnet(samples: int, generator: torch.Generator, *, width: int) -> Network:
    """ResNet-18 as it is for small images: width 64 is the published one."""
    x, y = _images(samples, generator)
    stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    stages = [[_Residual(a, b, 1 if a == b else 2), _Residual(b, b, 1)] for a, b in pairwise(widths)]
    model = nn.Sequential(stem, *(block for stage in stages for block in stage), _Pooled(widths[-1]))
    return Network(model=model, x=x, y=y, loss=nn.CrossEntropyLoss(), pieces=list, batch_norm=True, corners=True)


class _Patches(nn.Module):
    """Images (samples, 3, side, side) as tokens (samples, 1 + patches, width), the first of them one for the class."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, _PATCH, stride=_PATCH)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 1 + (_SIDE // _PATCH) ** 2, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.patches(x).flatten(2).transpose(1, 2)
        return torch.cat((self.token.expand(y.shape[0], -1, -1), y), dim=1) + self.places


class _Classified(nn.Module):
    """The scores of the classes, from the first token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(self.norm(x[:, 0]))
        return result


def _vit(samples: int, generator: torch.Generator, *, layers: int, width: int, heads: int) -> Network:
    x, y = _images(samples, generator)
    own = [
        nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        for _ in range(layers)
    ]
    model = nn.Sequential(_Patches(width), *own, _Classified(width))
    return Network(model=model, x=x, y=y, loss=nn.CrossEntropyLoss(), pieces=list)


def _perceptron(samples: int, generator: torch.Generator) -> Network:
    """The paper's, 203-80-26 with sigmoids and without biases."""
    sizes = (203, 80, 26)
    layers = [nn.Sequential(nn.Linear(a, b, bias=False), nn.Sigmoid()) for a, b in pairwise(sizes)]
    x, y = (torch.rand(samples, size, generator=generator) for size in (sizes[0], sizes[-1]))
    return Network(model=nn.Sequential(*layers), x=x, y=y, loss=nn.MSELoss(), pieces=list)


NETWORKS: dict[str, Callable[..., Network]] = {
    "gpt": _gpt,
    "llama": _llama,
    "resnet": _resnet,
    "vit": _vit,
    "perceptron": _perceptron,
}
