"""What splits in a module that cannot be followed, said by its author: `register`.

    class Heads(nn.Module): ...        # a hand-written kernel, control flow that depends on data

    tatami.train.register(Heads, units="num_heads", cut={"qkv.weight": (0, 3), "out.weight": 1},
                          once=["out.bias"])

Every module of that class is then run with some of its units: its tensors are cut, the attribute that counts the units says
how many are here, and the parts are summed. It is believed only after its own test, like everything else.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tatami.errors import ModelError
from tatami.partition.parts.part_module import AbstractParts
from tatami.partition.tracing.exporting import NotFollowedError
from tatami.runtime.context import ModuleContext
from tatami.runtime.rows import UnitRuns, slot_of

_lock = threading.Lock()
_declared: dict[type[nn.Module], Declaration] = {}


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """What `register` was told of a class of modules; see there."""

    units: str
    cut: Mapping[str, tuple[int, int]]
    once: frozenset[str]
    scaled: tuple[str, ...]
    unit: str
    index: str | None = None


def register(
    module: type[nn.Module],
    *,
    units: str,
    cut: Mapping[str, int | tuple[int, int]],
    once: Sequence[str] = (),
    scaled: Sequence[str] = (),
    unit: str = "unit",
    index: str | None = None,
) -> None:
    """Say how the modules of a class split, where `tatami.tile` cannot find out. For the life of the process.

    The module must be a sum over its units, f(x) = f_1(x) + ... + f_u(x), each with its own part of the tensors in `cut`. Its
    forward pass must take the number of units from the attribute `units`, and sizes that grow with it from those in `scaled`.

    Args:
        module: the class; classes that inherit from it are not meant.
        units: the attribute of a module that says how many units it has; dotted for one of a module inside.
        cut: for each tensor with a part for every unit, by its name in the module: the axis on which the units lie, all
            elements of a unit side by side; or (axis, runs) where the axis has them several times, such as 3 for a packed qkv.
        once: tensors that are added to the sum once: the bias of the last layer.
        scaled: other attributes that are a multiple of the number of units.
        unit: what a unit is, in words.
        index: the argument of the forward pass, a tensor of whole numbers, that says which units are to be used. Units that are
            elsewhere are named by the number of units that are here, and the module must leave them out.

    Raises:
        ModelError: what is no class of modules, nothing to cut, a tensor both in `cut` and in `once`, one name for several.
    """
    if not (isinstance(module, type) and issubclass(module, nn.Module)):
        raise ModelError(f"tatami.train.register takes a class of modules, not {module!r}")
    if not isinstance(units, str):
        raise ModelError(f"units is the attribute of {module.__name__} that says how many units it has, a name, not {units!r}")
    for what, names in (("once", once), ("scaled", scaled)):
        if isinstance(names, str):
            raise ModelError(f"{what} is a list of names, so write [{names!r}]")
    if both := sorted(set(cut) & set(once)):
        raise ModelError(f"{module.__name__} was registered with {both[0]} both in cut and in once; it is one of them")
    if not cut:
        raise ModelError(f"{module.__name__} was registered without a tensor that is cut; its units own nothing")
    axes = {name: axis if isinstance(axis, tuple) else (axis, 1) for name, axis in cut.items()}
    with _lock:
        _declared[module] = Declaration(
            units=units, cut=axes, once=frozenset(once), scaled=tuple(scaled), unit=unit, index=index
        )


def declaration_of(module: nn.Module) -> Declaration | None:
    """What was registered for the class of `module`."""
    with _lock:
        return _declared.get(type(module))


@dataclass(frozen=True, kw_only=True)
class DeclaredParts(AbstractParts):
    """A module of a registered class.

    Attributes:
        declaration: what was said of the class.
        total: units of this module.
        cuts: its tensors, and where the units lie in them.
    """

    declaration: Declaration
    total: int
    cuts: Mapping[str, UnitRuns]

    @classmethod
    def of(cls, module: nn.Module, declaration: Declaration) -> DeclaredParts:
        """Read off one module.

        Raises:
            ModelError: it lacks an attribute or a tensor that was named, or sizes do not fit the number of units.
        """
        what = f"{type(module).__name__}, as it was registered,"
        total = _get(module, declaration.units, what)
        if not isinstance(total, int) or total < 1:
            raise ModelError(f"{what} has {declaration.units} = {total!r}; it must be a number of units >= 1")
        tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
        cuts = {}
        for name, (given, runs) in declaration.cut.items():
            if name not in tensors:
                raise ModelError(f"{what} has no tensor {name!r}; it has {', '.join(sorted(tensors))}")
            shape = tensors[name].shape
            axis = given + len(shape) if given < 0 else given
            if not 0 <= axis < len(shape) or shape[axis] % (runs * total):
                raise ModelError(f"{what} has {name} of shape {tuple(shape)}, whose axis {given} is not {runs} x {total} units")
            run, inner = shape[axis] // runs, shape[axis] // (runs * total)
            cuts[name] = UnitRuns(axis=axis, runs=tuple((index * run, inner) for index in range(runs)))
        unknown = sorted(declaration.once - set(tensors))
        if unknown:
            raise ModelError(f"{what} has no tensor {unknown[0]!r}; it has {', '.join(sorted(tensors))}")
        for name in declaration.scaled:
            size = _get(module, name, what)
            if not isinstance(size, int) or size % total:
                raise ModelError(f"{what} has {name} = {size!r}, which is no multiple of its {total} units")
        return cls(declaration=declaration, total=total, cuts=cuts)

    def own(self) -> frozenset[str]:
        return frozenset(self.cuts)

    def once(self) -> frozenset[str]:
        return self.declaration.once

    def routed(self) -> bool:
        return self.declaration.index is not None

    def inputs(self, module: nn.Module, args: Any, kwargs: Any, context: ModuleContext) -> tuple[Any, Any]:
        name, span = self.declaration.index, context.units[0]()
        if name is None:
            return args, kwargs
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
        index = bound.arguments[name]
        here = (index >= span.start) & (index < span.stop)
        bound.arguments[name] = torch.where(here, index - span.start, max(span.size, 1))
        return bound.args[1:], bound.kwargs

    @contextmanager
    def with_units(self, module: nn.Module, context: ModuleContext) -> Iterator[None]:
        here = context.units[0]().size
        # A module of no unit may not work, so one of zeros takes part; its result is put to 0.
        lent = here or 1
        names = (self.declaration.units, *self.declaration.scaled)
        before = {name: _get(module, name, "") for name in names}
        widened: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        try:
            for name, size in before.items():
                _set(module, name, size // self.total * lent)
            for name, runs in self.cuts.items() if not here else ():
                owner, leaf = slot_of(module, name)
                tensor = owner[leaf]
                shape = list(tensor.shape)
                shape[runs.axis] = runs.per_unit
                widened.append((owner, leaf, tensor))
                # An empty tensor beside the zeros, so that what is here of the parameter has a gradient: of no element.
                owner[leaf] = torch.cat((tensor, tensor.new_zeros(shape)), runs.axis)
            yield
        finally:
            for name, size in before.items():
                _set(module, name, size)
            for owner, leaf, tensor in widened:
                owner[leaf] = tensor


def declared_parts(module: nn.Module) -> DeclaredParts | None:
    """How `module` runs in parts, if its class was registered.

    Raises:
        ModelError: it is not what was registered.
        NotFollowedError: it cannot be split here, for a reason that is no mistake.
    """
    declaration = declaration_of(module) or _stacked_experts(module)
    if declaration is None:
        return None
    parts = DeclaredParts.of(module, declaration)
    if parts.total < 2:
        raise NotFollowedError("it was registered, and has a single unit")
    return parts


_INDEX = "top_k_index"
"""By it modules of Hugging Face that hold all experts in one tensor are told which of them a token goes to. One that is
elsewhere is named by the number of experts, as in their own expert parallelism."""


def _stacked_experts(module: nn.Module) -> Declaration | None:
    """What is known of a module whose tensors are (experts, ...), without being registered."""
    tensors = dict(module.named_parameters(recurse=False))
    units = getattr(module, "num_experts", None)
    if not isinstance(units, int) or units < 2 or not tensors or len(tensors) < len(list(module.parameters())):
        return None
    if any(tensor.shape[:1] != (units,) for tensor in tensors.values()) or any(True for _ in module.buffers()):
        return None
    if _INDEX not in inspect.signature(type(module).forward).parameters:
        return None
    cut = dict.fromkeys(tensors, (0, 1))
    return Declaration(units="num_experts", cut=cut, once=frozenset(), scaled=(), unit="expert", index=_INDEX)


def _get(module: nn.Module, name: str, what: str) -> Any:
    here: Any = module
    for word in name.split("."):
        if not hasattr(here, word):
            raise ModelError(f"{what} has no attribute {name!r}")
        here = getattr(here, word)
    return here


def _set(module: nn.Module, name: str, value: int) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, value)
