"""Recording what one forward pass does: the network runs once, on a sample, and every operation is written down."""

from __future__ import annotations

import dis
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tatami.errors import ModelError
from tatami.random_state import torch_state
from tatami.stages.autograd_functions import watch_functions
from tatami.stages.program import (
    ForwardCall,
    ForwardForm,
    ForwardLook,
    ForwardOperation,
    ForwardProgram,
    ForwardValue,
    Reach,
)

_NOT_USERS = (str(Path(str(torch.__file__)).parent), str(Path(__file__).parent))
_LOOKS = frozenset(
    {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__", "equal", "allclose"}
)


def operation_name(func: Any) -> str:
    """How an operation of this function is called, the same in recording and in running."""
    name = getattr(func, "__name__", None) or type(func).__name__
    if name in ("__get__", "__set__"):
        return f"{name} {getattr(getattr(func, '__self__', None), '__name__', '')}"
    return str(name)


def call_operation(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run the function; what it returns bit by bit (iteration over a tensor) is made a list, so that it can be seen."""
    out = func(*args, **kwargs)
    return list(out) if operation_name(func) == "__iter__" else out


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of any structure, in the order of torch's pytree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


Meter = Callable[[], tuple[float, float]]
"""What the pass has computed (flop) and kept (bytes) until now."""


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The axes of a tensor in the order of memory, the outermost first."""
    if tensor.layout is not torch.strided:
        return tuple(range(tensor.dim()))
    strides = [each if isinstance(each, int) else each.node.hint for each in tensor.stride()]  # of a traced one
    return tuple(sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], axis)))


def record(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    atoms: Collection[str] = (),
    meter: Meter = lambda: (0.0, 0.0),
) -> ForwardProgram:
    """Run `module` on these inputs and write down what it does.

    Args:
        module: the network; its forward pass is that of the mode (training or not) that it is in. Batch statistics and random
            states change as by any forward pass.
        atoms: names of modules that count as one operation though they have modules inside of them.
        meter: is read after every operation.
    """
    watch_functions()
    recorder = _Recorder(module, atoms=atoms, meter=meter)
    with recorder.attached(), _Seeing(recorder), recorder:
        out = module(*args, **kwargs)
    for leaf in pytree.tree_leaves(out):
        held = [] if isinstance(leaf, torch.Tensor) else getattr(leaf, "__dict__", {}).values()
        if any(isinstance(each, torch.Tensor) for each in held):
            raise ModelError(
                f"the network returns a {type(leaf).__name__}, in which results of other pipeline stages are not found: return "
                "a dict, a tuple, a namedtuple or a ModelOutput of transformers, or use one stage"
            )
    return recorder.program(out)


class _Recorder(TorchFunctionMode):
    def __init__(self, module: nn.Module, *, atoms: Collection[str], meter: Meter) -> None:
        super().__init__()
        self._module, self._atoms, self._meter = module, atoms, meter
        self._metered = meter()
        self._parameters = {id(p): name for name, p in module.named_parameters()}
        self._own_buffers = dict(module.named_buffers())
        self._buffers = {id(b): name for name, b in self._own_buffers.items()}
        self._versions = {name: _version(b) for name, b in self._own_buffers.items()}
        self._weighed: set[str] = set()
        """Buffers that have been changed by what depends on parameters, as by a power iteration."""
        self._operations: list[ForwardOperation] = []
        self._values: list[ForwardValue] = []
        self._calls: list[ForwardCall] = []
        self._looks: list[ForwardLook] = []
        self._open: list[int] = []
        """The calls that have begun and not ended, the outermost first."""
        self.has_seen = False
        """Whether the operation that runs has handed values to Python, or made a shape of them."""
        self._number_of: dict[int, int] = {}
        """By the identity of a tensor, its value's number; as long as it lives, for then another may get its identity."""
        self._held: list[object] = []
        """Weak references: to tensors, and to their memory, which no other gets meanwhile."""
        self._by_memory: dict[int, list[int]] = {}
        """Values by the identity of their memory, of which views have the same."""
        self._inside: list[set[int]] | None = None
        """While an operation's inside runs: the parameters and buffers that it reads."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._inside is not None:
            self._inside[0].update(id(tensor) for tensor in tensors_in((args, kwargs)))
            return func(*args, **kwargs)
        name = operation_name(func)
        versions = [tensor._version for tensor in tensors_in((args, kwargs)) if not _is_inference(tensor)]
        self.has_seen = False
        out = call_operation(func, args, kwargs)
        changed = [
            tensor
            for tensor, before in zip((t for t in tensors_in((args, kwargs)) if not _is_inference(t)), versions, strict=True)
            if tensor._version != before
        ]
        if changed or tensors_in(out):
            self._add(name, args, kwargs, out, changed=changed, sees=self.has_seen)
        elif name in _LOOKS or self.has_seen:
            self._look(args, kwargs)
        return iter(out) if name == "__iter__" else out

    @contextmanager
    def attached(self) -> Iterator[None]:
        """While this lasts, calls of the network's modules come here first."""
        modules = dict(self._module.named_modules())
        before = {name: module.__dict__.get("forward") for name, module in modules.items()}
        for name, module in modules.items():
            if name:
                module.__dict__["forward"] = _recorded(self, name, module, module.forward)
        try:
            yield
        finally:
            for name, module in modules.items():
                own = before[name]
                if own is not None:
                    module.__dict__["forward"] = own
                else:
                    module.__dict__.pop("forward", None)

    def call(
        self, name: str, module: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A module is called."""
        if self._inside is not None:
            return plain(*args, **kwargs)
        first, place = len(self._operations), len(self._calls)
        self._calls.append(ForwardCall(module=name, first=first, stop=first, returns=()))
        self._open.append(place)
        before = torch_state()
        if name not in self._atoms and next(module.children(), None) is not None:
            out = plain(*args, **kwargs)
        else:
            out = self._atom(name, module, plain, args, kwargs)
        self._open.pop()
        returns = tuple(self._number_of.get(id(tensor)) for tensor in tensors_in(out))
        looks = any(place in look.calls for look in self._looks)
        draws = looks and not torch.equal(before, torch_state())
        self._calls[place] = ForwardCall(
            module=name,
            first=first,
            stop=len(self._operations),
            returns=returns,
            looks=looks,
            result=_forms(out, tensors_in((args, kwargs))) if looks and not draws else None,
        )
        return out

    def program(self, out: Any) -> ForwardProgram:
        """All of it, after the network returned `out`."""
        for name, buffer in self._module.named_buffers():
            if id(buffer) in self._number_of:  # the network has put a tensor of its own in the buffer's place
                number = self._values[self._number_of[id(buffer)]].made_by
                made = self._operations[number]
                self._operations[number] = replace(made, buffers=(*{*made.buffers, name},), updates=(*made.updates, name))
        return ForwardProgram(
            operations=tuple(self._operations),
            values=tuple(self._values),
            calls=tuple(self._calls),
            returns=tuple(self._number_of.get(id(tensor)) for tensor in tensors_in(out)),
            looks=tuple(self._looks),
        )

    def apply_function(self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A function with a gradient of its own is called: one operation, whatever it does inside."""
        if self._inside is not None:
            self._inside[0].update(id(tensor) for tensor in tensors_in((args, kwargs)))
            return run(*args, **kwargs)
        return self._whole(name, run, args, kwargs, module=False, touched=set())

    def _atom(
        self, name: str, module: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        touched = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        return self._whole(name, plain, args, kwargs, module=True, touched=touched)

    def _whole(
        self,
        name: str,
        plain: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        module: bool,
        touched: set[int],
    ) -> Any:
        self._inside, self.has_seen = [touched], False
        given = {id(tensor): tensor._version for tensor in tensors_in((args, kwargs)) if not _is_inference(tensor)}
        try:
            out = plain(*args, **kwargs)
        finally:
            self._inside, sees = None, self.has_seen
        changed = [t for t in tensors_in((args, kwargs)) if not _is_inference(t) and t._version != given[id(t)]]
        self._add(name, args, kwargs, out, changed=changed, module=module, sees=sees, touched=touched)
        return out

    def _add(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: Any,
        *,
        changed: list[torch.Tensor],
        sees: bool,
        module: bool = False,
        touched: Collection[int] = (),
    ) -> None:
        given = tensors_in((args, kwargs))
        touched = {*touched, *(id(tensor) for tensor in given)}
        parameters = tuple(name for key, name in self._parameters.items() if key in touched)
        buffers = tuple(name for key, name in self._buffers.items() if key in touched)
        versions = {name: _version(self._own_buffers[name]) for name in buffers}
        updates = tuple(name for name in buffers if versions[name] != self._versions[name])
        self._versions |= versions
        reads = tuple(dict.fromkeys(self._number_of[id(t)] for t in given if id(t) in self._number_of))
        reaches = {self._values[number].reach for number in reads}
        is_weighed = bool(parameters) or Reach.FLOATING in reaches or not self._weighed.isdisjoint(buffers)
        # An input, or what is computed of inputs alone: each stage would compute something as large as the batch.
        has_inputs = Reach.EVERYWHERE in reaches or any(self._is_input(tensor) for tensor in given)
        if Reach.STAGED in reaches or (is_weighed and (module or has_inputs)):
            reach = Reach.STAGED
        elif is_weighed:
            reach = Reach.FLOATING
        else:
            reach = Reach.EVERYWHERE
        if reach is not Reach.EVERYWHERE:
            self._weighed.update(updates)
        number = len(self._operations)
        before, self._metered = self._metered, self._meter()
        changes = tuple(dict.fromkeys(n for tensor in changed for n in self._by_memory.get(_memory(tensor), ())))
        returned = tensors_in(out)
        makes: list[int | None] = []
        # A tensor that was changed in place is a new value, whether it is returned or not.
        for tensor in (*returned, *(t for t in changed if all(t is not each for each in returned))):
            if id(tensor) in self._parameters or id(tensor) in self._buffers:
                makes.append(None)
                continue
            is_given = any(tensor is each for each in given)
            if is_given and all(tensor is not each for each in changed):
                makes.append(self._number_of.get(id(tensor)))
                continue
            made = ForwardValue(
                number=len(self._values),
                made_by=number,
                size_bytes=tensor.numel() * tensor.element_size(),
                requires_grad=tensor.requires_grad,
                reach=reach,
            )
            self._values.append(made)
            self._remember(tensor, made.number)
            self._by_memory.setdefault(_memory(tensor), []).append(made.number)
            makes.append(made.number)
        self._operations.append(
            ForwardOperation(
                number=number,
                name=name,
                module=module,
                reads=reads,
                makes=tuple(makes),
                parameters=parameters,
                buffers=buffers,
                updates=updates,
                changes=changes,
                returns_change=all(any(t is each for each in returned) for t in changed) and not (changed and _is_dropped()),
                reach=reach,
                line=_users_line() if not module else "",
                flop=self._metered[0] - before[0],
                kept_bytes=self._metered[1] - before[1],
            )
        )
        if sees and reach is not Reach.EVERYWHERE:
            self._looks.append(ForwardLook(value=None, made_by=number, calls=tuple(self._open), line=_users_line()))

    def _remember(self, tensor: torch.Tensor, number: int) -> None:
        key, numbers = id(tensor), self._number_of
        numbers[key] = number
        shown = getattr(tensor, "meta", tensor)
        self._held += [
            weakref.ref(tensor, lambda _: numbers.pop(key, None)),
            StorageWeakRef(shown.untyped_storage()),  # type: ignore[no-untyped-call]
        ]

    def _is_input(self, tensor: torch.Tensor) -> bool:
        return all(id(tensor) not in known for known in (self._number_of, self._parameters, self._buffers))

    def _look(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for tensor in tensors_in((args, kwargs)):
            number = self._number_of.get(id(tensor))
            value = None if number is None else self._values[number]
            if value is not None and value.reach is not Reach.EVERYWHERE:
                look = ForwardLook(value=number, made_by=value.made_by, calls=tuple(self._open), line=_users_line())
                self._looks.append(look)


class _Seeing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells a recorder of operations whose shape, or what they hand to Python, depends on values."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler to keep it away from this

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            self._recorder.has_seen = True
        elif torch.Tag.dynamic_output_shape in func.tags:
            masks = [each for each in tensors_in(args[1:]) if each.dtype in (torch.bool, torch.uint8)]
            self._recorder.has_seen |= func is not torch.ops.aten.index.Tensor or bool(masks)
        return func(*args, **(kwargs or {}))


def _forms(out: Any, given: list[torch.Tensor]) -> Any:
    """`out` with a `ForwardForm` in place of each tensor; None where one is like nothing that was given."""
    leaves, structure = pytree.tree_flatten(out)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            alike = (i for i, each in enumerate(given) if each.dtype == leaf.dtype and leaf.shape in ((), each.shape))
            like = next(alike, None)
            if like is None:
                return None
            leaves[place] = ForwardForm(like=like, has_axes=leaf.dim() > 0)
    return pytree.tree_unflatten(leaves, structure)


def _recorded(recorder: _Recorder, name: str, module: nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return recorder.call(name, module, plain, args, kwargs)

    return forward


def _version(tensor: torch.Tensor) -> int:
    return 0 if _is_inference(tensor) else tensor._version


def _is_inference(tensor: torch.Tensor) -> bool:
    return tensor.is_inference()


def _memory(tensor: torch.Tensor) -> int:
    """Which memory a tensor, or the meta tensor of a stand-in, has; views have that of their base."""
    shown = getattr(tensor, "meta", tensor)
    return int(shown.untyped_storage()._cdata)


def _users_frame() -> FrameType | None:
    """The innermost call outside of torch and of this package."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((*_NOT_USERS, "<")):
        frame = frame.f_back
    return frame


def _users_line() -> str:
    """The line of that call."""
    frame = _users_frame()
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _is_dropped() -> bool:
    """Whether what the innermost call of the user's code returns is used by nothing, as in a line `x.add_(y)`."""
    frame = _users_frame()
    steps = [] if frame is None else list(dis.get_instructions(frame.f_code))
    after = (later.opname for step, later in pairwise(steps) if frame is not None and step.offset == frame.f_lasti)
    return next(after, "") == "POP_TOP"
