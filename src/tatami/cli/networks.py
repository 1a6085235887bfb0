"""The plain networks that `tatami train` trains: a perceptron, a GPT and a convolutional network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from tatami.datasets.digits import CLASSES, SIDE


def perceptron(sizes: Sequence[int], *, scores: bool) -> nn.Module:
    """Linear layers with sigmoids between them, and after the last one too unless the loss takes `scores`."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Sigmoid()]
    return nn.Sequential(*(layers[:-1] if scores else layers))


def digits_cnn(*, layers: int, width: int) -> nn.Module:
    """For digits `(samples, 64)`: a convolution, `layers` residual layers of `width` channels, and a linear layer."""
    return nn.Sequential(
        nn.Unflatten(1, (1, SIDE, SIDE)),
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        *(ResidualLayer(width) for _ in range(layers)),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * width, CLASSES),
    )


class ResidualLayer(nn.Module):
    """Two convolutions with batch normalization, which are split over the channels between them, and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(x + y)


class CausalAttention(nn.Module):
    """Every token looks at itself and at those before it. `(samples, tokens, width)` to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, width = x.shape
        parts = self.qkv(x).split(width, dim=2)
        q, k, v = (part.view(samples, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.out(y.transpose(1, 2).reshape(samples, tokens, width))
        return result


class GptLayer(nn.Module):
    """Attention and a perceptron, each of a norm of its input, to which it is added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = CausalAttention(width, heads)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        result: torch.Tensor = x + self.perceptron(self.norms[1](x))
        return result


class CharacterGpt(nn.Module):
    """From characters `(samples, tokens)` the logits of those that follow, `(samples, tokens, characters)`."""

    def __init__(self, *, characters: int, layers: int, width: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(tokens, width)
        self.layers = nn.Sequential(*(GptLayer(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.characters(text) + self.places(torch.arange(text.shape[1], device=text.device))
        result: torch.Tensor = self.head(self.layers(x))
        return result


class NextTokenLoss(nn.CrossEntropyLoss):
    """The cross-entropy of logits `(samples, tokens, characters)` and targets `(samples, tokens)`, over all tokens.

    The characters stay the last axis, so that the ranks of a column need not gather logits that are split over them.
    """

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(input.flatten(0, 1), target.flatten())
