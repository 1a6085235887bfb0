"""The task of a training job: the data, the network and the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from tatami.cli.train_job import TrainJob
from tatami.datasets import DEFAULT, NAMES, Dataset, load
from tatami.datasets.digits import CLASSES, SIDE, with_shifts
from tatami.datasets.text import load_text
from tatami.errors import InputError, shortened
from tatami.workload import parse_net

MODELS = ("gpt", "mlp", "cnn")
LOSSES = ("mse", "squared-error", "cross-entropy")
DEFAULT_NETS = {"digits": "64-80-10", "nettalk": "203-80-26"}
DEFAULT_LOSSES = {"digits": "cross-entropy", "nettalk": "mse"}
HELD_OUT = 0.2
"""Fraction of the samples that measures the accuracy; NETtalk, as in the paper, is measured on the training data."""
NETTALK_SAMPLES = 1024
"""Number of letters, out of 146,934, that the classic experiment draws."""
TEXT_SAMPLES = 2048
"""Number of sequences of a text; a small GPT sees all of them in some seconds."""

_MODELS_OF = {
    "net": (),
    "data": ("mlp", "cnn"),
    "nettalk": ("mlp",),
    "loss": ("mlp",),
    "text": ("gpt",),
    "layers": ("gpt", "cnn"),
    "width": ("gpt", "cnn"),
    "heads": ("gpt",),
    "tokens": ("gpt",),
}
"""The models that each option applies to, if a model is given."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """The task of a job, with its defaults.

    Attributes:
        data: the name of the data.
        train: the training samples.
        test: the samples for the accuracy; the training samples if none are held out.
        net: a description of the network: layer sizes, or the model with its sizes.
        asked: the option that selects it.
        make: makes the plain network; its weights come from torch's random state.
        loss, loss_name: the loss, and its name in `LOSSES`.
        lr: the default learning rate of Adam.
        batch_size: the default; None for all samples.
        is_perceptron: whether its workload follows from `net`; for any other network a sample is needed.
    """

    data: str
    train: Dataset
    test: Dataset
    net: str
    asked: str
    make: Callable[[], nn.Module]
    loss: nn.Module
    loss_name: str
    lr: float = 0.01
    batch_size: int | None = None
    is_perceptron: bool = False


def task_of(job: TrainJob) -> Task:
    """Make the task of a job.

    Raises:
        InputError: an unknown model, data set or loss, an option of another model, or sizes that do not match; one of its
            subclasses for a file.
        MissingExtraError: the data set needs a package that is not installed.
    """
    if job.model is not None:
        check_choice("model", job.model, MODELS)
    for option, models in _MODELS_OF.items():
        allowed = job.model in models or (job.model is None and (option == "net" or "mlp" in models))
        if getattr(job, option) is not None and not allowed:
            fits = f"is for --model {' or '.join(models)}" if models else "is a perceptron, the model if none is given"
            given = "there is no --model" if job.model is None else f"--model {job.model} was given"
            raise InputError(f"--{option} {fits}, but {given}; leave one of them out")
    if job.model == "gpt":
        return _gpt(job)
    return _cnn(job) if job.model == "cnn" else _perceptron(job)


def check_choice(what: str, value: str, choices: Iterable[str]) -> None:
    """Check that a value is one of the choices.

    Raises:
        InputError: `value` is not among `choices`.
    """
    if value not in choices:
        raise InputError(f"there is no {what} {shortened(value)!r}; choose one of: {', '.join(choices)}")


def _gpt(job: TrainJob) -> Task:
    layers, width, heads, tokens = job.layers or 2, job.width or 48, job.heads or 6, job.tokens or 32
    if width % heads:
        raise InputError(
            f"a width of {width} does not divide by {heads} heads; make --width (by default 48) a multiple of --heads (6)"
        )
    text = load_text(job.text, tokens=tokens)
    drawn = text.draw(job.samples or min(TEXT_SAMPLES, text.samples), seed=job.seed)
    train, test = drawn.split(test_fraction=HELD_OUT, seed=job.seed)
    return Task(
        data="text",
        train=train,
        test=test,
        net=f"gpt {layers}x{width}, {heads} heads, {tokens} tokens",
        asked="--model gpt",
        make=partial(CharacterGpt, characters=text.outputs, layers=layers, width=width, heads=heads, tokens=tokens),
        loss=NextTokenLoss(),
        loss_name="cross-entropy",
        lr=0.003,
        batch_size=16,
    )


def _cnn(job: TrainJob) -> Task:
    if job.data not in (None, "digits"):
        raise InputError(f"--model cnn trains on the images of digits, not on --data {shortened(job.data)}; leave --data out")
    layers, width = job.layers or 2, job.width or 16
    digits = load("digits", samples=job.samples, seed=job.seed, targets="classes")
    train, test = digits.split(test_fraction=HELD_OUT, seed=job.seed)
    return Task(
        data="digits",
        train=train,
        test=test,
        net=f"cnn {layers}x{width}",
        asked="--model cnn",
        make=partial(digits_cnn, layers=layers, width=width),
        loss=nn.CrossEntropyLoss(),
        loss_name="cross-entropy",
        batch_size=64,
    )


def _perceptron(job: TrainJob) -> Task:
    data = job.data or DEFAULT
    check_choice("data set", data, NAMES)
    loss = job.loss or DEFAULT_LOSSES[data]
    check_choice("loss", loss, LOSSES)
    samples = NETTALK_SAMPLES if job.samples is None and data == "nettalk" else job.samples
    targets = "classes" if loss == "cross-entropy" else "one_hot"
    dataset = load(data, path=job.nettalk, samples=samples, seed=job.seed, targets=targets)
    train, test = (dataset, dataset) if data == "nettalk" else dataset.split(test_fraction=HELD_OUT, seed=job.seed)
    net = job.net or DEFAULT_NETS[data]
    sizes = parse_net(net)
    if (sizes[0], sizes[-1]) != (train.inputs, train.outputs):
        raise InputError(
            f"--net {shortened(net)} has {sizes[0]} inputs and {sizes[-1]} outputs, but {data} has {train.inputs} and "
            f"{train.outputs}; write it as {train.inputs}-...-{train.outputs}"
        )
    return Task(
        data=data,
        train=with_shifts(train) if job.shifts else train,
        test=test,
        net=net,
        asked=f"--net {shortened(net)}",
        make=partial(perceptron, sizes, scores=loss == "cross-entropy"),
        loss=nn.CrossEntropyLoss() if loss == "cross-entropy" else nn.MSELoss(reduction="mean" if loss == "mse" else "sum"),
        loss_name=loss,
        is_perceptron=True,
    )


def perceptron(sizes: Sequence[int], *, scores: bool) -> nn.Module:
    """Make linear layers with sigmoids between them, and after the last one too unless the loss takes `scores`."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Sigmoid()]
    return nn.Sequential(*(layers[:-1] if scores else layers))


def digits_cnn(*, layers: int, width: int) -> nn.Module:
    """Make a CNN for digits `(samples, 64)`: a convolution, `layers` residual layers of `width` channels, a linear layer."""
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
    """Two convolutions with batch normalization, split over the channels between them, and a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(x + y)


class CausalAttention(nn.Module):
    """Causal self-attention, from `(samples, tokens, width)` to the same shape."""

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
    """Attention and a perceptron, each applied to a norm of its input and added to it."""

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
    """Maps characters `(samples, tokens)` to the logits of the next ones, `(samples, tokens, characters)`."""

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

    Characters remain the last axis, so that the ranks of a replica need not gather logits that are split over them.
    """

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(input.flatten(0, 1), target.flatten())
