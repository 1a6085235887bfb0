"""`torch.nn.utils.clip_grad_norm_` and `get_total_norm` of tiled parameters and gradients: over the units of all ranks.

Torch takes a norm of each tensor and the norm of those norms. Here the first step is made right for tensors that are tiles, and
everything else stays torch's: its arguments, its errors, its scaling. Both functions sort their tensors by device and dtype
first. From there tiles go on as `_Tile`, which answers one question differently, what its norm is; so the functions become
collective, and a step without them costs nothing. A subclass for all gradients at all times would be simpler, and would double
what an optimizer takes for a small tensor.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad

from tatami.errors import ModelError, warn
from tatami.runtime.norms import WholeNorms, models, register

_plainly: Any = nn.Parameter.__torch_function__
"""Calls a function of torch as if its arguments were of no subclass."""
_SORT, _SCALE = "_group_tensors_by_device_and_dtype", "_clip_grads_with_norm_"


_lock = threading.Lock()


def watch_norms() -> None:
    """From now on, torch's norms of tiled parameters and of their gradients are whole ones."""
    with _lock:
        sort: Callable[..., Any] = getattr(clip_grad, _SORT, _no_sort)
        if isinstance(sort, _Sort):
            return
        setattr(clip_grad, _SORT, _Sort(sort))
        if (scale := getattr(clip_grad, _SCALE, None)) is not None:
            setattr(clip_grad, _SCALE, partial(_scaled, scale))
    if not _is_asked():
        warn(
            f"torch {torch.__version__} clips gradients in a way that is not known here: torch.nn.utils.clip_grad_norm_ and "
            "get_total_norm would see only this rank's part of a tiled model. Call model.clip_grad_norm_ instead"
        )


class _Batch:
    """The tiles of one call; their norms are exchanged together when the first one is asked for."""

    def __init__(self, norms: WholeNorms) -> None:
        self._norms = norms
        self._tensors: list[torch.Tensor] = []
        self._found: dict[float, torch.Tensor] = {}

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        self._tensors.append(tensor)
        tile = tensor.detach().as_subclass(_Tile)
        tile.batch, tile.place = self, len(self._tensors) - 1
        return tile

    def norm(self, place: int, norm_type: float) -> torch.Tensor:
        if norm_type not in self._found:
            self._found[norm_type] = self._norms.of(self._tensors, norm_type, tiled=[True] * len(self._tensors))
        return self._found[norm_type][place].to(self._tensors[place].dtype)


class _WholeBatch(_Batch):
    """The tensors of a model with pipeline stages or a sharded optimizer.

    The first one has the norm of all, and the others what changes no norm of norms. The norm of order 0 is a number of tensors,
    as torch counts them: so many have 1.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model.norms)
        self._model = model

    def norm(self, place: int, norm_type: float) -> torch.Tensor:
        if norm_type not in self._found:
            total = self._model.norm_of(self._tensors, norm_type, everyone=False)
            self._found[norm_type] = torch.tensor(total, dtype=torch.float64, device="cpu")
        found = self._found[norm_type].to(self._tensors[place])
        if norm_type == 0:
            return (found > place).to(found.dtype)
        return found if place == 0 else torch.full_like(found, math.inf if norm_type < 0 else 0.0)


class _Tile(torch.Tensor):
    """The memory of a tensor of which this rank holds some units; its norm is that of all units."""

    batch: _Batch
    place: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.linalg.vector_norm:
            return _norm(*args, **kwargs)
        if func is torch._foreach_norm:
            return _norms(*args, **kwargs)
        return _plainly(func, types, args, kwargs)


def _norm(tensor: torch.Tensor, norm_type: float = 2.0, **others: Any) -> torch.Tensor:
    if others:
        raise ModelError(f"the norm of a tile with {', '.join(others)} is not known here; call model.clip_grad_norm_ instead")
    if isinstance(tensor, _Tile):
        return tensor.batch.norm(tensor.place, float(norm_type))
    whole: torch.Tensor = torch.linalg.vector_norm(tensor, norm_type)
    return whole


def _norms(tensors: Sequence[torch.Tensor], norm_type: float = 2.0, **others: Any) -> list[torch.Tensor]:
    return [_norm(tensor, norm_type, **others) for tensor in tensors]


class _Sort:
    """Torch's function that sorts tensors by device and dtype, after which tiles are known as such."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original

    def __call__(self, lists: Any, *args: Any, **kwargs: Any) -> Any:
        owners = _owners()
        if not any(id(tensor) in owners for tensors in lists for tensor in tensors):
            return self._original(lists, *args, **kwargs)
        batches = {
            id(model): _WholeBatch(model) if _is_summed_whole(model) else _Batch(model.norms) for model in owners.values()
        }

        def marked(tensor: Any) -> Any:
            model = owners.get(id(tensor))
            return tensor if model is None else batches[id(model)].add(tensor)

        return self._original([[marked(tensor) for tensor in tensors] for tensors in lists], *args, **kwargs)


def _scaled(scale: Callable[..., None], parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> None:
    """Torch's function that scales gradients. If all of them are on other pipeline stages, this rank's are clipped apart."""
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if all(each.grad is None for each in listed):
        given = set(map(id, listed))
        for model in _models_here():
            stage: Any = getattr(model, "stage", None)
            has_gradients = stage is not None and any(each.grad is not None for each in model.own_parameters())
            if has_gradients and not given.isdisjoint(map(id, model.parameters())):
                stage.is_clipped_apart = True
    scale(listed, *args, **kwargs)


def _is_summed_whole(model: Any) -> bool:
    return getattr(model, "stage", None) is not None or getattr(model, "sharding", None) is not None


def _owners() -> dict[int, Any]:
    """By the identity of every parameter and gradient whose norm is not this rank's alone, the model that it is of."""
    return {
        id(tensor): model
        for model in _models_here()
        for parameter in (model.own_parameters() if _is_summed_whole(model) else model.tiled_parameters())
        for tensor in (parameter, parameter.grad)
        if tensor is not None
    }


def _models_here() -> list[Any]:
    """The models of this thread: where ranks are threads, gradients of others change while we look."""
    here = threading.get_ident()
    return [model for model in models() if getattr(model, "thread", here) == here]


def _no_sort(*_: Any) -> Any:
    raise AssertionError("this torch has no such function, so nothing calls it")


class _Probe(WholeNorms):
    """Stands in for a tiled model whose one gradient has a norm of 7."""

    def __init__(self) -> None:
        self.norms = self
        self.parameter = nn.Parameter(torch.zeros(1))
        self.parameter.grad = torch.ones(1)

    def tiled_parameters(self) -> list[nn.Parameter]:
        return [self.parameter]

    def plain_parameters(self) -> list[nn.Parameter]:
        return []

    def parts_of(self, held: Collection[int], *, is_sharded: bool) -> list[tuple[int, int, int]]:  # noqa: ARG002
        return []

    def of(self, tensors: Sequence[torch.Tensor], norm_type: float, *, tiled: Sequence[bool]) -> torch.Tensor:  # noqa: ARG002
        return torch.tensor([7.0])


def _is_asked() -> bool:
    """Whether this version of torch takes the way that `_Sort` stands in."""
    probe = _Probe()
    register(probe)
    return torch.nn.utils.clip_grad_norm_(probe.tiled_parameters(), 1.0).item() == 7.0
