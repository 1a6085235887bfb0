"""Modules that have the same program are traced once: the layers of a transformer, and the ranks of a world of threads.

What a trace depends on is compared: the structure of the modules and of the call, and the attributes that were read while the
first of them was traced. A layer whose index is not read has the program of its neighbour; one that scales by its index has
its own. Code may also depend on what is no attribute of a module (a global, the identity of a module), so the caller gives a
test that every further module must pass.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tatami.partition.tracing.exporting import ModuleCall, same_leaves
from tatami.partition.tracing.restore_state import alike

_MOST = 256
"""Number of results that are kept."""
_MOST_FAILURES = 2
"""So many modules of one structure fail for the same reason before the others are taken to fail as well: each costs a trace."""
_STRUCTURE = {"_parameters", "_buffers", "_modules", "training"}
_ABSENT = "no such attribute"
_HEAP_TYPE = 1 << 9
"""Flag of classes that were made by Python code, whose instances keep what they know in their dict."""

Result = TypeVar("Result")


class SameResults(Generic[Result]):
    """Results for modules, each computed once for all modules of the same structure, call and attributes.

    Args:
        compute: gives the result for a module, its call and further arguments, or says in a text why there is none.
        holds: whether a result of another module is right for this one.
    """

    def __init__(self, compute: Callable[..., Result | str], *, holds: Callable[[nn.Module, ModuleCall, Result], bool]) -> None:
        self._compute = compute
        self._holds = holds
        self._known: list[_Known[Result]] = []

    def of(self, module: nn.Module, call: ModuleCall, *args: Any) -> Result | str:
        """The result of `compute(module, call, *args)`, which may be that of a module computed before."""
        structure = (*structure_of(module, call), *args)
        same = [each for each in self._known if alike(each.structure, structure)]
        for known in same:
            failed = isinstance(known.result, str)
            if known.reads.hold(module) and (failed or self._holds(module, call, known.result)):  # type: ignore[arg-type]
                self._known.remove(known)
                self._known.append(known)
                return known.result
        reasons = [each.result for each in same if isinstance(each.result, str)]
        if len(same) == len(reasons) >= _MOST_FAILURES and len(set(reasons)) == 1:
            return reasons[0]
        with reads_of(module) as reads:
            result = self._compute(module, call, *args)
        self._known.append(_Known(structure=structure, reads=reads(), result=result))
        del self._known[:-_MOST]
        return result


@dataclass(frozen=True, kw_only=True)
class Reads:
    """The attributes on which a result depends.

    Attributes:
        values: what they were, by the name of the module and of the attribute.
    """

    values: Mapping[tuple[str, str], Any]

    def hold(self, module: nn.Module) -> bool:
        """Whether the attributes of `module`, which has the same structure, have the same values."""
        held = {name: vars(inner) for name, inner in module.named_modules(remove_duplicate=False)}
        return all(alike(value, _snapshot(held[at].get(name, _ABSENT))) for (at, name), value in self.values.items())


@dataclass(frozen=True, kw_only=True, eq=False)
class _Known(Generic[Result]):
    structure: tuple[Any, ...]
    reads: Reads
    result: Result | str


def structure_of(module: nn.Module, call: ModuleCall) -> tuple[Any, ...]:
    """What can be compared of a module and its call without knowing what of it is read."""
    first: dict[int, int] = {}

    def described(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return _snapshot(value)
        stride = value.stride() if value.layout is torch.strided else ()
        place = first.setdefault(id(value), len(first))  # what is shared inside of the module
        return type(value), place, tuple(value.shape), stride, value.dtype, value.device, value.requires_grad

    modules = tuple(
        (
            name,
            type(inner),
            first.setdefault(id(inner), len(first)),
            inner.training,
            tuple((own, described(value)) for held in (inner._parameters, inner._buffers) for own, value in held.items()),
            tuple(own for own, value in inner._modules.items() if value is None),
        )
        for name, inner in module.named_modules(remove_duplicate=False)
    )
    leaves, structure = pytree.tree_flatten((call.args, dict(call.kwargs)))
    return modules, str(structure), tuple(map(described, leaves)), same_leaves(leaves), call.sample_axes


@contextmanager
def reads_of(module: nn.Module) -> Iterator[Callable[[], Reads]]:
    """Gives a function that returns the attributes of `module`, and of those inside of it, that were read in this block.

    Values are those from before the block. Code of torch and of Tatami goes through all attributes of a module, to copy them or
    to put them back; only where other code does so are all of them taken as read.
    """
    held = {name: dict(vars(inner)) for name, inner in module.named_modules(remove_duplicate=False)}
    places: dict[int, list[str]] = {}
    for name, inner in module.named_modules(remove_duplicate=False):
        places.setdefault(id(vars(inner)), []).append(name)  # torch traces objects that stand for modules, with their dicts
    raw = object.__getattribute__
    before = nn.Module.__dict__.get("__getattribute__")
    # torch looks for tensors and for what is written in C++ in all attributes. Whose classes look up attributes in a way of
    # their own need not come by here.
    seen = {
        (name, own)
        for name, inner in module.named_modules(remove_duplicate=False)
        for own, value in held[name].items()
        if isinstance(value, (torch.Tensor, torch.ScriptObject)) or type(inner).__getattribute__ not in (raw, before)
    }

    def watched(self: nn.Module, name: str) -> Any:
        for at in places.get(id(raw(self, "__dict__")), ()):
            if name != "__dict__":
                seen.add((at, name))
            elif not _is_library(sys._getframe(1).f_globals.get("__name__", "")):
                seen.update((at, own) for own in held[at])
        return raw(self, name) if before is None else before(self, name)

    nn.Module.__getattribute__ = watched  # type: ignore[method-assign, assignment]
    try:
        yield lambda: Reads(
            values={(at, name): _snapshot(held[at].get(name, _ABSENT)) for at, name in seen if name not in _STRUCTURE}
        )
    finally:
        del nn.Module.__getattribute__
        if before is not None:
            nn.Module.__getattribute__ = before  # type: ignore[method-assign]


def _is_library(name: str) -> bool:
    return name.partition(".")[0] in ("torch", "tatami", "copy", "copyreg", "weakref", "inspect")


def _snapshot(value: Any, around: tuple[int, ...] = ()) -> Any:
    """What `alike` compares of an attribute: data by value, cut loose from what may still change, all else by identity.

    An object of plain Python (the configuration of a network) is what it holds.
    """
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device)):
        return value
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not isinstance(value, nn.Parameter):
        return value.detach().clone()
    if id(value) in around:
        return "around", len(around) - around.index(id(value))
    inside = (*around, id(value))
    if isinstance(value, dict):
        return type(value), tuple((_snapshot(key, inside), _snapshot(each, inside)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_snapshot(each, inside) for each in value)
    if isinstance(value, types.MethodType):
        return value.__func__, _Same(value.__self__)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(value)
    if not isinstance(value, (nn.Module, torch.Tensor)) and _is_plain_object(value):
        return type(value), _snapshot(dict(vars(value)), inside)
    return _Same(value)


def _is_plain_object(value: Any) -> bool:
    mro = type(value).__mro__[:-1]
    return hasattr(value, "__dict__") and all(cls.__flags__ & _HEAP_TYPE and "__slots__" not in vars(cls) for cls in mro)


class _Same:
    """Equal to the same object alone, which it does not keep alive."""

    def __init__(self, value: Any) -> None:
        try:
            self._value: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._value = lambda: value

    def __eq__(self, other: object) -> bool:
        mine = self._value()
        return isinstance(other, _Same) and mine is not None and mine is other._value()

    __hash__ = None  # type: ignore[assignment]
