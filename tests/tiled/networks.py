"""Networks that people train, small: for tests that they can be tiled exactly as they come."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from drawing import one_at_a_time
from tatami.train import register

VOCABULARY = 11
LARGE = 512
"""A vocabulary that is worth splitting."""

Batch: TypeAlias = "tuple[torch.Tensor, ...] | dict[str, torch.Tensor]"
"""The arguments of a network: in order, or by name."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network and what it is trained on.

    Attributes:
        build: makes it; after `torch.manual_seed` the same one every time.
        draw: inputs for so many samples, from a generator; each of their tensors has the samples first.
        blocks: the kinds of blocks that are to be found, in order.
    """

    build: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], Batch]
    blocks: tuple[str, ...]


class CausalSelfAttention(nn.Module):
    """nanoGPT's."""

    def __init__(self, width: int, heads: int, *, flash: bool, dropout: float, tokens: int) -> None:
        super().__init__()
        assert width % heads == 0
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head, self.n_embd, self.dropout, self.flash = heads, width, dropout, flash
        self.register_buffer("bias", torch.tril(torch.ones(tokens, tokens)).view(1, 1, tokens, tokens))

    def forward(self, x: torch.Tensor) -> Any:
        B, T, C = x.size()  # noqa: N806 - as in nanoGPT
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            dropout = self.dropout if self.training else 0
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=dropout, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
            att = att.masked_fill(self.get_buffer("bias")[:, :, :T, :T] == 0, float("-inf"))
            att = self.attn_dropout(F.softmax(att, dim=-1))
            y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> Any:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class GPTLayer(nn.Module):
    def __init__(self, width: int, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(width), attention, nn.LayerNorm(width), mlp

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """nanoGPT, with its `assert`, which torch.fx cannot follow."""

    def __init__(
        self, *, width: int = 12, heads: int = 6, layers: int = 2, flash: bool = True, dropout: float = 0.0, tied: bool = True,
        layer: Callable[[int], nn.Module] | None = None, vocabulary: int = VOCABULARY,
    ) -> None:  # fmt: skip
        super().__init__()
        self.block_size = 8
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(self.block_size, width)

        def ordinary(width: int) -> nn.Module:
            attention = CausalSelfAttention(width, heads, flash=flash, dropout=dropout, tokens=self.block_size)
            return GPTLayer(width, attention, MLP(width, dropout))

        self.h = nn.ModuleList([(layer or ordinary)(width) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, idx: torch.Tensor) -> Any:
        _, t = idx.size()
        assert t <= self.block_size, f"Cannot forward sequence of length {t}"
        x = self.wte(idx) + self.wpe(torch.arange(t, device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class PackedGEGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> Any:
        a, b = self.up(x).chunk(2, dim=-1)
        return self.down(F.gelu(a) * b)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class GroupedAttention(nn.Module):
    """Llama's: fewer keys than queries, rotary embeddings; and a norm of queries and keys, as later ones have."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q_proj = nn.Linear(width, heads * self.size, bias=False)
        self.k_proj = nn.Linear(width, groups * self.size, bias=False)
        self.v_proj = nn.Linear(width, groups * self.size, bias=False)
        self.o_proj = nn.Linear(heads * self.size, width, bias=False)
        self.q_norm = nn.RMSNorm(self.size)

    def forward(self, x: torch.Tensor) -> Any:
        b, t, _ = x.shape
        kind: Any = {"dtype": x.dtype, "device": x.device}
        angle = torch.arange(t, **kind)[:, None] / torch.arange(1, self.size + 1, **kind)
        q = self.q_norm(self.q_proj(x).view(b, t, -1, self.size)).transpose(1, 2)
        k = self.k_proj(x).view(b, t, -1, self.size).transpose(1, 2)
        v = self.v_proj(x).view(b, t, -1, self.size).transpose(1, 2)
        q = q * angle.cos() + rotate_half(q) * angle.sin()
        k = k * angle.cos() + rotate_half(k) * angle.sin()
        repeats = self.heads // self.groups
        k = k[:, :, None].expand(b, self.groups, repeats, t, self.size).reshape(b, self.heads, t, self.size)
        v = v[:, :, None].expand(b, self.groups, repeats, t, self.size).reshape(b, self.heads, t, self.size)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class Parallel(nn.Module):
    """GPT-NeoX's layer, written in one module: attention and perceptron side by side."""

    def __init__(self, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> Any:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, self.heads, 3 * c // self.heads).transpose(1, 2).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, t, c)) + self.down(F.gelu(self.up(x)))


class Fused(nn.Module):
    """PaLM's layer: one projection for the hidden units of a SwiGLU and for all of attention; one for both results, or two.

    With as many keys as queries it is that of ViT-22B and of Flux; with `shared`, all heads have the same keys and values. With
    `apart`, keys and values are given by a layer of their own.
    """

    def __init__(
        self, *, hidden: int, shared: bool = False, apart: bool = False, one: bool = True, bias: bool = False,
        dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.size, width = 3, 4, 12
        keys = [self.size if shared else width] * 2
        self.widths = (2 * hidden, width) if apart else (2 * hidden, width, *keys)
        self.keys = nn.Linear(width, sum(keys), bias=bias) if apart else None
        self.norm = nn.LayerNorm(width)
        self.fused = nn.Linear(width, sum(self.widths), bias=bias)
        outputs = [width + hidden] if one else [width, hidden]
        self.outs = nn.ModuleList([nn.Linear(inputs, width, bias=bias) for inputs in outputs])
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> Any:
        b, t, _ = x.shape
        normed = self.norm(x)
        ff, *qkv = self.fused(normed).split(self.widths, dim=-1)
        if self.keys is not None:
            qkv += self.keys(normed).chunk(2, dim=-1)
        q, k, v = (each.view(b, t, -1, self.size).transpose(1, 2) for each in qkv)
        k, v = (each.expand(b, self.heads, t, self.size) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1)
        gate, h = ff.chunk(2, dim=-1)
        both = [y, F.silu(gate) * h]
        if len(self.outs) == 1:
            both = [self.dropout(torch.cat(both, dim=-1))]
        return x + sum(out(each) for out, each in zip(self.outs, both, strict=True))


class LowRank(nn.Module):
    """A linear layer that is frozen, with a trained low-rank addition; it converts to the dtype that it has, as peft does."""

    def __init__(self, linear: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = linear.requires_grad_(False)
        self.a, self.b = nn.Linear(linear.in_features, rank, bias=False), nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        base: torch.Tensor = self.base(x)
        return (base + 2 * self.b(self.a(x))).to(base.dtype)


def low_rank_gpt() -> nn.Module:
    model = GPT(tied=False)
    model.requires_grad_(False)
    for layer in model.h:
        assert isinstance(layer, GPTLayer)
        assert isinstance(layer.mlp, MLP)
        layer.mlp.c_fc = LowRank(layer.mlp.c_fc)  # type: ignore[assignment]
        layer.mlp.c_proj = LowRank(layer.mlp.c_proj)  # type: ignore[assignment]
    return model


class Encoder(nn.Module):
    """torch's own transformer layers, in either order of axes."""

    def __init__(self, *, batch_first: bool = True, decoder: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 3, 18, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoderLayer(12, 4, 10, dropout=0.0, batch_first=batch_first) if decoder else None
        self.batch_first = batch_first
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> Any:
        x = x if self.batch_first else x.transpose(0, 1)
        y = self.encoder(x)
        if self.decoder is not None:
            y = self.decoder(x, y)
        y = y if self.batch_first else y.transpose(0, 1)
        return self.head(y.mean(1))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(2, 12, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 12))
        layer = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.ModuleList([layer])
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat((self.token.expand(y.shape[0], -1, -1), y), dim=1)
        for layer in self.layers:
            y = layer(y)
        return self.head(y[:, 0])


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> Any:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        self.layers = nn.Sequential(Residual(4, 4, 1), Residual(4, 6, 2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.layers(self.stem(x)).mean((2, 3)))


class Mobile(nn.Module):
    """An inverted residual: a depthwise convolution between two of one pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(2, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU6(),
            nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False), nn.BatchNorm2d(6), nn.ReLU6(), nn.AvgPool2d(2),
            nn.Conv2d(6, 4, 1),
        )  # fmt: skip
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.block(x).mean((2, 3)))


class AutoEncoder(nn.Module):
    """Convolutions down, transposed ones up, one of which is depthwise."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(2, 5, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(5, 3, 3, padding="same"))
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(3, 6, 3, stride=2, padding=1, output_padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
            nn.ConvTranspose2d(6, 6, 3, padding=1, groups=6), nn.ReLU(),
            nn.ConvTranspose2d(6, 2, 1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> Any:
        return self.decode(self.encode(x).tanh())


class ResNeXt(nn.Module):
    """A convolution of three groups between two others; all as large as their inputs, one padded with its other side."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding="same"), nn.ReLU(),
            nn.Conv2d(6, 12, 3, padding="same", groups=3, padding_mode="circular"), nn.ReLU(),
            nn.Conv2d(12, 4, (1, 3), padding="same"),
        )  # fmt: skip
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.block(x).mean((2, 3)))


def generator() -> nn.Module:
    """Channels out of nothing: 5 of length 2, then 2 of length 5."""
    return nn.Sequential(
        nn.Linear(3, 10), nn.ReLU(), nn.Unflatten(1, (5, 2)), nn.ConvTranspose1d(5, 2, 3, stride=2, bias=False)
    )


class Mixer(nn.Module):
    """MLP-Mixer: a pair over tokens, a pair over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 6)
        self.norm1, self.norm2 = nn.LayerNorm(6), nn.LayerNorm(6)
        self.tokens = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5))
        self.channels = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norm2(x))
        return self.head(x.mean(1))


class Recurrent(nn.Module):
    """An LSTM with a perceptron on top."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, num_layers=2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> Any:
        output, _ = self.lstm(x)
        return self.head(output[:, -1])


class Experts(nn.Module):
    """A sparse mixture: each token goes to the two experts that a router likes best."""

    def __init__(self, width: int, num_experts: int = 5) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 7), nn.GELU(), nn.Linear(7, width)) for _ in range(num_experts)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2, dim=-1)
        result = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            row, place = torch.where(chosen == index)
            if len(row):
                result = result.index_add(0, row, expert(rows[row]) * weights[row, place, None])
        return result.view(x.shape)


class StackedExperts(nn.Module):
    """The experts of Hugging Face's mixtures, in one tensor each: index `num_experts` is none of them."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, 6, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, width, 6) / 6**0.5)

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(hidden_states)
        for index in top_k_index.unique():  # type: ignore[no-untyped-call]
            if index < self.num_experts:
                row, place = torch.where(top_k_index == index)
                y = F.linear(F.gelu(F.linear(hidden_states[row], self.up[index])), self.down[index])
                result.index_add_(0, row, y * top_k_weights[row, place, None])
        return result


class Stacked(nn.Module):
    """A sparse mixture over them."""

    def __init__(self, width: int, num_experts: int = 5) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, num_experts), StackedExperts(width, num_experts)

    def forward(self, x: torch.Tensor) -> Any:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2, dim=-1)
        return self.experts(rows, chosen, weights).view(x.shape)


class WrittenHeads(nn.Module):
    """An attention that torch.export cannot follow: what it does depends on numbers. It is registered below."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.inner = heads, width
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width // heads))

    def forward(self, x: torch.Tensor) -> Any:
        b, t, _ = x.shape
        if x.detach().sum().item() > 1e9:
            raise ValueError("these numbers are too large")
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(self.inner, dim=2))
        y = F.scaled_dot_product_attention(q * self.scale, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, self.inner))


register(
    WrittenHeads,
    units="heads",
    scaled=["inner"],
    cut={"qkv.weight": (0, 3), "qkv.bias": (0, 3), "out.weight": 1},
    once=["out.bias"],
    unit="head",
)


def _tokens(samples: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (torch.randint(VOCABULARY, (samples, 6), generator=generator),)


def _tokens_of_many(samples: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (torch.randint(LARGE, (samples, 6), generator=generator),)


def reals(*shape: int) -> Callable[[int, torch.Generator], tuple[torch.Tensor, ...]]:
    def draw(samples: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return (torch.rand(samples, *shape, generator=generator, dtype=torch.float64),)

    return draw


def _layer(attention: Callable[[int], nn.Module], mlp: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    return lambda width: GPTLayer(width, attention(width), mlp(width))


_GPT = ("attention", "linear pair") * 2
CASES: dict[str, Case] = {
    "gpt": Case(build=GPT, draw=_tokens, blocks=_GPT),
    "gpt-untied-by-hand": Case(build=lambda: GPT(flash=False, tied=False), draw=_tokens, blocks=_GPT),
    "gpt-dropout": Case(build=lambda: GPT(dropout=0.3, layers=1), draw=_tokens, blocks=_GPT[:2]),
    "gpt-dropout-by-hand": Case(build=lambda: GPT(dropout=0.3, layers=1, flash=False), draw=_tokens, blocks=_GPT[:2]),
    "llama": Case(
        build=lambda: GPT(
            width=24, layers=2, layer=_layer(lambda width: GroupedAttention(width, 6, 3), lambda width: SwiGLU(width, 10))
        ),
        draw=_tokens,
        blocks=("attention", "gated pair") * 2,
    ),
    "parallel": Case(build=Parallel, draw=reals(5, 12), blocks=_GPT[:2]),
    "fused": Case(
        build=lambda: nn.Sequential(Fused(hidden=9), Fused(hidden=6, bias=True, dropout=0.3)),
        draw=reals(5, 12),
        blocks=("attention with perceptron",) * 2,
    ),
    "fused-two-outputs": Case(
        build=lambda: Fused(hidden=9, one=False, bias=True), draw=reals(5, 12), blocks=("attention with perceptron",)
    ),
    "fused-shared-keys": Case(
        build=lambda: nn.Sequential(Fused(hidden=9, shared=True), Fused(hidden=6, shared=True, one=False)),
        draw=reals(5, 12),
        blocks=(),
    ),
    "fused-shared-keys-apart": Case(
        build=lambda: Fused(hidden=9, shared=True, apart=True), draw=reals(5, 12), blocks=("attention with perceptron",)
    ),
    "fused-hidden-units-that-heads-do-not-divide": Case(
        build=lambda: nn.Sequential(Fused(hidden=7), Fused(hidden=8, one=False)), draw=reals(5, 12), blocks=()
    ),
    "geglu": Case(
        build=lambda: GPT(width=12, layers=1, layer=_layer(nn.Identity, lambda width: PackedGEGLU(width, 7))),
        draw=_tokens,
        blocks=("gated pair",),
    ),
    "vocabulary": Case(
        build=lambda: GPT(layers=1, layer=_layer(nn.Identity, nn.Identity), vocabulary=LARGE),
        draw=_tokens_of_many,
        blocks=("vocabulary",),
    ),
    "vocabulary-untied": Case(
        build=lambda: GPT(layers=1, layer=_layer(nn.Identity, nn.Identity), vocabulary=LARGE, tied=False),
        draw=_tokens_of_many,
        blocks=("vocabulary",),
    ),
    "experts": Case(
        build=lambda: GPT(layers=2, layer=_layer(nn.Identity, Experts)), draw=_tokens, blocks=("mixture of experts",) * 10
    ),
    "experts-in-one-tensor": Case(
        build=lambda: GPT(layers=2, layer=_layer(nn.Identity, Stacked)), draw=_tokens, blocks=("mixture of experts",) * 2
    ),
    "registered": Case(
        build=lambda: GPT(layers=2, layer=_layer(lambda width: WrittenHeads(width, 3), nn.Identity)),
        draw=_tokens,
        blocks=("WrittenHeads",) * 2,
    ),
    "lora": Case(build=low_rank_gpt, draw=_tokens, blocks=_GPT),
    "encoder": Case(build=Encoder, draw=reals(5, 12), blocks=_GPT),
    "encoder-time-first": Case(build=lambda: Encoder(batch_first=False), draw=reals(5, 12), blocks=_GPT),
    "decoder": Case(
        build=lambda: Encoder(decoder=True), draw=reals(5, 12), blocks=(*_GPT, "attention", "attention", "linear pair")
    ),
    "vit": Case(build=ViT, draw=reals(2, 8, 8), blocks=("attention", "linear pair")),
    "resnet": Case(build=ResNet, draw=reals(2, 8, 8), blocks=("convolution pair",) * 2),
    "mobile": Case(build=Mobile, draw=reals(2, 6, 6), blocks=("convolution pair",)),
    "autoencoder": Case(build=AutoEncoder, draw=reals(2, 6, 6), blocks=("convolution pair",) * 2),
    "resnext": Case(build=ResNeXt, draw=reals(2, 5, 5), blocks=("convolution pair",)),
    "generator": Case(build=generator, draw=reals(3), blocks=("convolution pair",)),
    "mixer": Case(build=Mixer, draw=reals(5, 3), blocks=("linear pair", "linear pair")),
    "lstm": Case(build=Recurrent, draw=reals(4, 3), blocks=("linear pair",)),
}


@one_at_a_time
def build(case: Case) -> Any:
    """The network of a case in double precision."""
    torch.manual_seed(3)
    return case.build().double()
