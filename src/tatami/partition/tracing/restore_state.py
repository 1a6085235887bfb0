"""What a pass over a network changes in its modules: seen, and put back however the pass ends.

A forward pass is the user's own Python. It may assign buffers, count, keep its last result or add to a list; while a tracer
follows it, what it keeps are the tracer's own objects, which must not stay.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tatami.errors import InputError
from tatami.random_state import kept_torch_state

NOT_ATTRIBUTES = {"_parameters", "_buffers", "_modules", "training"}
"""What `vars(module)` has beside settings and hooks."""
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type})
"""Types of values that cannot change and hold nothing."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers that have as many bytes as a floating point number."""
_AT_ONCE = 1 << 20
"""So many elements are added up at a time."""


class ModuleState:
    """What the modules of `model` hold now: which objects, and what is in buffers, tensors, lists, sets and dicts.

    And the states of the generators of Python and NumPy. Weights are not copied: a network may be nearly as large as the memory
    is. `WeightSums` sees whether they change.
    """

    def __init__(self, model: nn.Module) -> None:
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._sets: list[tuple[set[Any], set[Any]]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._seen: set[int] = set()
        self._before: dict[str, Any] = {}
        self._model = model
        for module in model.modules():
            for held in (vars(module), module._parameters, module._buffers, module._modules):
                self._remember(held)
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def mark(self) -> None:
        """What `changes` tells of begins now."""
        self._before = {name: _copied(value) for name, value in _attributes(self._model)}

    def draws_outside(self) -> str | None:
        """Whose random numbers were drawn since then, if not torch's."""
        if random.getstate() != self._python:
            return "Python's random"
        return None if all(map(np.array_equal, np.random.get_state(), self._numpy)) else "numpy.random"

    def changes(self) -> dict[str, Any]:
        """Buffers and attributes that are not what they were at `mark`, by qualified name, with copies of their values now."""
        now = dict(_attributes(self._model))
        return {
            name: _copied(now.get(name))
            for name in self._before.keys() | now.keys()
            if name not in self._before or name not in now or not alike(self._before[name], now[name])
        }

    def put_back(self) -> None:
        """Make it all as it was."""
        if self.draws_outside() is not None:
            random.setstate(self._python)
            np.random.set_state(self._numpy)
        for held, items in self._dicts:
            if held or items:
                if list(held) != list(items):
                    held.clear()
                held.update(items)
        for listed, elements in self._lists:
            listed[:] = elements
        for members, before in self._sets:
            members.clear()
            members.update(before)
        with torch.no_grad():
            for tensor, values, version in self._tensors:
                _fill(tensor, values, version)

    def _remember(self, held: Any) -> None:
        todo = [held]
        while todo:
            value = todo.pop()
            # Tests of containers come first: there are thousands of them, and isinstance(value, nn.Parameter) runs Python.
            if type(value) in _PLAIN or id(value) in self._seen:
                continue
            if isinstance(value, dict):
                self._dicts.append((value, dict(value)))
                todo += value.values()
            elif isinstance(value, list):
                self._lists.append((value, list(value)))
                todo += value
            elif isinstance(value, tuple):
                todo += value
            elif isinstance(value, set):
                self._sets.append((value, set(value)))
            elif isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self._tensors.append((value, value.detach().clone(), value._version))
            else:
                continue
            self._seen.add(id(value))


class WeightSums:
    """Sums over the bits of the weights of `model`, from which it is seen whether a pass changed them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = self._sums()

    def changed(self) -> list[str]:
        """The parameters that are not what they were."""
        now = self._sums()
        return [name for name, total in self._before.items() if name in now and total != now[name]]

    def _sums(self) -> dict[str, int]:
        found = {}
        for name, parameter in self._model.named_parameters():
            value = parameter.data
            if not nn.parameter.is_lazy(parameter) and value.layout is torch.strided and value.is_floating_point():
                # As integers they are added up without rounding, in whatever order; a part at a time, for torch makes 8 bytes
                # of each.
                bits = value.view(_BITS[value.element_size()])
                rows = max(1, _AT_ONCE * bits.shape[0] // max(1, bits.numel())) if bits.dim() else 0
                parts = torch.split(bits, rows) if rows else (bits,)
                found[name] = sum([int(part.sum()) for part in parts])
        return found


@contextmanager
def kept(model: nn.Module) -> Iterator[ModuleState]:
    """What is done to the modules inside of it is put back, also when it raises."""
    state = ModuleState(model)
    try:
        yield state
    finally:
        state.put_back()


@contextmanager
def unchanged(model: nn.Module) -> Iterator[ModuleState]:
    """For passes in training: what they change (running statistics, what the modules keep, random state) is put back."""
    with kept(model) as state, kept_torch_state():
        model.train()
        state.mark()
        yield state


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy, also of a network that holds results of an earlier pass, whose history torch refuses to copy.

    Raises:
        InputError: something that the network holds cannot be copied.
    """
    held = pytree.tree_leaves([value for _, value in _attributes(model)])
    memo = {id(leaf): leaf.detach().clone() for leaf in held if isinstance(leaf, torch.Tensor) and not leaf.is_leaf}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # whatever the user's objects raise
        raise InputError(
            f"the network cannot be copied, which tiling it begins with: copy.deepcopy(model) says {type(error).__name__}: "
            f"{error}. Keep what cannot be copied (locks, files, generators) outside of its modules"
        ) from error


def alike(one: Any, other: Any) -> bool:
    """Whether two values of an attribute are the same; a NaN is like another."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)) or type(one) is not type(other):
            return False
        return one.shape == other.shape and one.dtype == other.dtype and _equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(value, other[key]) for key, value in one.items())
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    try:
        return bool(one == other) or repr(one) == repr(other) == "nan"
    except Exception:  # the user's own comparison, or one of arrays
        return False


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Buffers, and what modules hold beside parameters, modules and hooks."""
    for prefix, module in model.named_modules():
        lead = f"{prefix}." if prefix else ""
        own = {name: value for name, value in vars(module).items() if name not in NOT_ATTRIBUTES and "_hooks" not in name}
        for name, value in (own | dict(module._buffers.items())).items():  # that of a script is no dict
            if not isinstance(value, nn.Module):
                yield lead + name, value


def _copied(value: Any) -> Any:
    """What `alike` compares, cut loose from what may still change."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.layout is torch.strided and not isinstance(value, nn.Parameter) else value
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return set(value) if isinstance(value, set) else value


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return one is other
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def _fill(tensor: torch.Tensor, before: torch.Tensor, version: int) -> None:
    # What did not change is left alone: a buffer may be expanded, and cannot be written to.
    same = tensor._version == version if tensor.layout is not torch.strided else alike(tensor.detach(), before)
    if not same:
        tensor.detach().copy_(before)
