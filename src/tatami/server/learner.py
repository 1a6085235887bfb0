"""What is trained, and what one worker computes of it: the gradient of its share of a round's batch, as one flat vector."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import default_collate

from tatami.datasets.dataset import Data
from tatami.errors import InputError, ModelError
from tatami.server.optimizers import Vector
from tatami.server.pieces import views

_SEEDS = 2**64
"""So many there are; the epochs of a run go round."""
ModelFn = Callable[[], nn.Module]
LossFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`loss_fn(model(x), y)`: a scalar, the mean over the samples."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """Which samples a round has, and which worker computes which of them: the same in every process that asks.

    Attributes:
        samples: of the data set.
        batch_size: of a round; the last one of an epoch may be smaller.
        seed: of the order in which epochs go through the samples, and of each task's own draws.
        speeds: relative, by worker; a worker that is not in it counts as 1.
    """

    samples: int
    batch_size: int
    seed: int
    speeds: tuple[float, ...] = ()

    def share(self, *, round_: int, worker: int, members: Sequence[int]) -> torch.Tensor:
        """The indices `(samples_here,)` that `worker` has in this round, if `members` divide it by their speeds."""
        per_epoch = -(-self.samples // self.batch_size)
        epoch, batch = divmod(round_, per_epoch)
        order = _order(self.samples, (self.seed + epoch) % _SEEDS)
        indices = order[batch * self.batch_size : (batch + 1) * self.batch_size]
        speeds = [self.speeds[member] if member < len(self.speeds) else 1.0 for member in members]
        place = list(members).index(worker)
        start, stop = (round(len(indices) * sum(speeds[:upto]) / sum(speeds)) for upto in (place, place + 1))
        return indices[start:stop]

    def task_seed(self, *, round_: int, worker: int) -> int:
        """Seeds dropout and the like, so that a task that is done again draws the same."""
        digest = hashlib.sha256(f"{self.seed}/{round_}/{worker}".encode()).digest()
        return int.from_bytes(digest[:7], "little")


@lru_cache(maxsize=2)
def _order(samples: int, seed: int) -> torch.Tensor:
    """The order of the samples in an epoch, (samples,); kept, since the rounds of an epoch ask one after the other."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed))


class Learner:
    """A model whose parameters come and whose gradients go as vectors in pieces.

    Raises:
        ModelError: a model without parameters, with parameters of several dtypes, or with batch statistics.
    """

    def __init__(self, model: nn.Module, *, loss_fn: LossFn, data: Data, course: Course) -> None:
        check_model(model)
        self.model = model
        self._loss_fn = loss_fn
        self._data = data
        self._course = course
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    @property
    def parameters(self) -> Vector:
        """All trainable parameters, one after the other: `(elements,)`."""
        return flatten([parameter.detach() for parameter in self._parameters])

    def load(self, parts: Sequence[Vector]) -> None:
        """Take the parameters from the shards, given in order: one copy, straight into the model."""
        start = 0
        with torch.no_grad():
            for parameter in self._parameters:
                target = parameter.detach()
                flat = target.view(-1) if target.is_contiguous() else torch.empty(target.numel(), dtype=target.dtype)
                array, filled = flat.numpy(), 0
                for part in views(parts, start=start, stop=start + len(array)):
                    np.copyto(array[filled : filled + len(part)], part)
                    filled += len(part)
                if not target.is_contiguous():
                    target.copy_(flat.view_as(target))
                start += len(array)

    def gradient(self, *, round_: int, worker: int, members: Sequence[int]) -> tuple[list[Vector], float, int]:
        """The gradient of the mean loss over the worker's share; that loss; and how many samples it has.

        The gradient is one vector `(elements,)` for each parameter, and shares memory with the model's until the next call.

        Raises:
            InputError: the loss is not a scalar.
        """
        indices = self._course.share(round_=round_, worker=worker, members=members)
        if not len(indices):
            return [np.zeros_like(each.detach().reshape(-1).numpy()) for each in self._parameters], 0.0, 0
        x, y = fetch(self._data, indices)
        # All that draws here is on the CPU; `torch.manual_seed` goes through every kind of device, which takes 1 ms.
        torch.default_generator.manual_seed(self._course.task_seed(round_=round_, worker=worker))
        self.model.zero_grad(set_to_none=True)
        loss = self._loss_fn(self.model(x), y)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            raise InputError(f"loss_fn must return a scalar tensor, the mean over the samples; it returned {what}")
        loss.sum().backward()  # type: ignore[no-untyped-call]
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in self._parameters]
        return [each.reshape(-1).numpy() for each in gradients], float(loss.detach()), len(indices)


def fetch(data: Data, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of these samples."""
    if isinstance(data, tuple):
        return data[0][indices], data[1][indices]
    x, y = default_collate([data[index] for index in indices.tolist()])
    return x, y


def check_model(model: nn.Module) -> None:
    """Whether the model can be trained by parameter servers. Raises as `Learner`."""
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trainable:
        raise ModelError("the model has no parameters to train")
    dtypes = sorted({str(parameter.dtype) for _, parameter in trainable})
    if len(dtypes) > 1 or trainable[0][1].dtype not in (torch.float32, torch.float64):
        raise ModelError(f"all parameters must be float32, or all float64; these are {', '.join(dtypes)}")
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            raise ModelError(
                f"{name} ({type(module).__name__}) keeps running statistics, which differ between workers; "
                "use nn.GroupNorm or nn.LayerNorm, or track_running_stats=False"
            )


def signature(model: nn.Module) -> str:
    """A text that is the same for models that have the same trainable parameters."""
    return "; ".join(
        f"{name} {tuple(each.shape)} {each.dtype}" for name, each in model.named_parameters() if each.requires_grad
    )


def flatten(tensors: Sequence[torch.Tensor]) -> Vector:
    """One vector `(elements,)` of all tensors."""
    vector: Vector = torch.cat([tensor.reshape(-1) for tensor in tensors]).numpy()
    return vector


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """The user's part of a run.

    Raises:
        InputError: not a function, or not data.
    """

    model_fn: ModelFn
    loss_fn: LossFn
    dataset: Data

    def __post_init__(self) -> None:
        for name in ("model_fn", "loss_fn"):
            if not callable(function := getattr(self, name)):
                raise InputError(f"{name} must be a function, not {function!r}")

    def model(self, *, seed: int) -> nn.Module:
        """What `model_fn` builds.

        Raises:
            ModelError: it cannot be trained by parameter servers.
            InputError: it is not a module, or `model_fn` ends the process.
        """
        torch.manual_seed(seed)
        try:
            model = self.model_fn()
        except SystemExit as error:
            raise InputError(f"model_fn ends the process (exit code {error.code}); it must return a model") from error
        if not isinstance(model, nn.Module):
            raise InputError(f"model_fn must return a torch.nn.Module, not {model!r}")
        check_model(model)
        return model

    def samples(self) -> int:
        """How many there are.

        Raises:
            InputError: none, or inputs and targets that are not as many as each other, or no data set.
        """
        data = self.dataset
        if isinstance(data, tuple):
            if len(data) != 2 or not all(isinstance(each, torch.Tensor) and each.ndim for each in data):
                what = ", ".join(type(each).__name__ for each in data)
                raise InputError(f"dataset must be a pair of tensors (samples, ...), inputs and targets, not ({what})")
            if len(data[0]) != len(data[1]):
                raise InputError(f"{len(data[0])} inputs but {len(data[1])} targets; each input needs one")
            size = len(data[0])
        elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
            size = len(data)
        else:
            what = type(data).__name__
            raise InputError(f"dataset must be a pair of tensors, or have a length and dataset[i] == (x, y); {what} has not")
        if size == 0:
            raise InputError("the data set is empty")
        return size
