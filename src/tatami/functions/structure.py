"""What can be sent: tensors, and containers of them, nested; taken apart into leaves and put together again.

Containers are tuples, lists and dicts, and classes made of fields, which all ranks have: named tuples (such as PackedSequence),
ordered dicts and dataclasses.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from tatami.errors import InputError

_is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether this is a stand-in of `torch.func`."""

Structure = Any
"""A tensor, None, or a container of structures."""

Spec = Any
"""A structure with a `Leaf` for each tensor; hashable. Dicts are a `_Dict`, lists a `_List`, others a `_Made`."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """What is known of a tensor without its values.

    Attributes:
        dtype: of torch.
        shape: of this tensor.
        wants: whether its sender waits for a gradient.
        device: the kind of device it was on; it travels by way of the CPU.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    wants: bool
    device: str = "cpu"

    def describe(self) -> str:
        """`float32 (3, 4)`."""
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


@dataclass(frozen=True, slots=True)
class _List:
    items: tuple[Spec, ...]


@dataclass(frozen=True, slots=True)
class _Dict:
    keys: tuple[Any, ...]
    items: tuple[Spec, ...]


@dataclass(frozen=True, slots=True)
class _Made:
    """A named tuple, ordered dict or dataclass: its class, which is sent by its name, and its fields or keys."""

    kind: Any
    names: tuple[Any, ...]
    items: tuple[Spec, ...]

    def made(self, values: Sequence[Structure]) -> Structure:
        """One with these values."""
        if self.kind is PackedSequence:  # its batch sizes are on the CPU wherever its data is
            values = [each.cpu() if name == "batch_sizes" else each for name, each in zip(self.names, values, strict=True)]
        if hasattr(self.kind, "__dataclass_fields__"):
            return self.kind(**dict(zip(self.names, values, strict=True)))
        return self.kind(*values) if issubclass(self.kind, tuple) else self.kind(zip(self.names, values, strict=True))


@dataclass(frozen=True, slots=True)
class Packed:
    """A spec, its bytes on the wire, its leaves in order, their sizes in bytes, and of which a gradient is wanted."""

    spec: Spec
    wire: bytes
    leaves: tuple[Leaf, ...]
    sizes: tuple[int, ...]
    wants: bool
    wants_all: bool


def flatten(value: Structure, *, operation: str) -> tuple[list[torch.Tensor], Packed]:
    """The tensors of `value` in order, and what is needed to put it together again. Gradients are wanted in grad mode.

    Of tensors on a device, differentiable copies on the CPU: their gradients take the same way back.

    Raises:
        InputError: something in it is not a tensor, or one that is not moved; names its path.
    """
    if type(value) is torch.Tensor and value.is_cpu and _is_plain(value) and not _is_wrapped(value):
        return [value], _of_one(value.dtype, value.shape, value.requires_grad and torch.is_grad_enabled())
    tensors: list[torch.Tensor] = []
    # A wanted gradient is decided here, once: autograd may be off by the time the message is packed.
    spec = _flatten(value, tensors, operation, "", torch.is_grad_enabled())
    return tensors, packed(spec)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory has its numbers one after another."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def _flatten(value: Structure, tensors: list[torch.Tensor], operation: str, path: str, grad: bool) -> Spec:
    """`grad`: whether gradients are on."""
    if isinstance(value, torch.Tensor):
        device = value.device.type
        if _is_wrapped(value):
            raise InputError(
                f"{operation}: x{path} is inside a torch.func transform (grad, vmap, ...), so it has no memory that could be "
                "sent; take gradients by backward(), and send outside of vmap"
            )
        if not _is_plain(value):
            what = "quantized" if value.is_quantized else "nested" if value.is_nested else str(value.layout)
            plain = "dequantize()" if value.is_quantized else "to_padded_tensor(0.0)" if value.is_nested else "to_dense()"
            raise InputError(f"{operation}: x{path} is a {what} tensor; convert it with .{plain}")
        if device == "meta":
            raise InputError(f"{operation}: x{path} is on meta, where a tensor has a shape and no values that could be moved")
        tensors.append(value if device == "cpu" else value.cpu())
        return Leaf(value.dtype, tuple(value.shape), grad and value.requires_grad, device)
    if value is None:
        return None
    if type(value) is tuple:
        return tuple([_flatten(item, tensors, operation, f"{path}[{i}]", grad) for i, item in enumerate(value)])
    if type(value) is list:
        return _List(tuple([_flatten(item, tensors, operation, f"{path}[{i}]", grad) for i, item in enumerate(value)]))
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        for key in value:
            if not isinstance(key, str | int):
                raise InputError(f"{operation}: x{path} is a dict with the key {key!r}; keys must be of type str or int")
        items = tuple([_flatten(item, tensors, operation, f"{path}[{key!r}]", grad) for key, item in value.items()])
        return _Dict(tuple(value), items) if kind is dict else _Made(kind, tuple(value), items)
    names = _fields(value)
    if names is None:
        raise InputError(
            f"{operation}: x{path} is of type {kind.__module__}.{kind.__qualname__}; only tensors and tuples, lists, dicts, "
            "named tuples and dataclasses of tensors are moved. Make numbers and arrays tensors with torch.as_tensor(...)"
        )
    if "<locals>" in kind.__qualname__:
        raise InputError(
            f"{operation}: x{path} is of type {kind.__qualname__}, which other ranks cannot find; define it outside of "
            "functions"
        )
    parts = [_flatten(getattr(value, name), tensors, operation, f"{path}.{name}", grad) for name in names]
    return _Made(kind, names, tuple(parts))


def _fields(value: Any) -> tuple[str, ...] | None:
    """Field names of a dataclass or a named tuple; None for anything else."""
    if dataclasses.is_dataclass(value):
        return tuple(field.name for field in dataclasses.fields(value) if field.init)
    return tuple(value._fields) if isinstance(value, tuple) and hasattr(value, "_fields") else None


def unflatten(spec: Spec, tensors: Iterator[torch.Tensor], *, device: torch.device | None = None) -> Structure:
    """The structure of `spec` with its leaves from `tensors`, on `device`; None: each on the kind of device it came from."""
    if isinstance(spec, Leaf):
        tensor = next(tensors)
        if device is not None:
            return tensor.to(device)
        return tensor if spec.device == "cpu" else tensor.to(spec.device)
    if isinstance(spec, tuple):
        return tuple([unflatten(item, tensors, device=device) for item in spec])
    if isinstance(spec, _List):
        return [unflatten(item, tensors, device=device) for item in spec.items]
    if isinstance(spec, _Dict):
        return {key: unflatten(item, tensors, device=device) for key, item in zip(spec.keys, spec.items, strict=True)}
    if isinstance(spec, _Made):
        return spec.made([unflatten(item, tensors, device=device) for item in spec.items])
    return None


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with every leaf changed: what lies in its tuples (named ones, too), lists and dicts, at any depth."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, change) for item in value))
    if isinstance(value, tuple | list):
        return type(value)([mapped(item, change) for item in value])
    if isinstance(value, dict):
        made = copy.copy(value)  # what else it holds, as the default of a defaultdict, stays
        for key, item in value.items():
            made[key] = mapped(item, change)
        return made
    return change(value)


def with_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """`value` with every tensor changed, and with its other leaves as they are."""
    return mapped(value, lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf)


@lru_cache(maxsize=4096)
def _of_one(dtype: torch.dtype, shape: torch.Size, wants: bool) -> Packed:
    return packed(Leaf(dtype, tuple(shape), wants))


@lru_cache(maxsize=4096)
def packed(spec: Spec) -> Packed:
    """`spec` with its bytes on the wire."""
    return _packed(spec, pickle.dumps(spec, protocol=4))


@lru_cache(maxsize=4096)
def unpacked(wire: bytes) -> Packed:
    """What `packed` made these bytes from."""
    return _packed(pickle.loads(wire), wire)


def _packed(spec: Spec, wire: bytes) -> Packed:
    leaves = tuple(_leaves(spec))
    sizes = tuple([prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves])
    wants = [leaf.wants for leaf in leaves]
    return Packed(spec, wire, leaves, sizes, any(wants), all(wants))


def flat(tensors: Sequence[torch.Tensor | None]) -> Packed:
    """A tuple of tensors, where some are missing. Gradients are wanted in grad mode."""
    grad = torch.is_grad_enabled()
    return _flat(tuple([None if t is None else (t.dtype, t.shape, grad and t.requires_grad) for t in tensors]))


@lru_cache(maxsize=4096)
def _flat(facts: tuple[tuple[torch.dtype, torch.Size, bool] | None, ...]) -> Packed:
    return packed(tuple([None if each is None else Leaf(each[0], tuple(each[1]), each[2]) for each in facts]))


def _leaves(spec: Spec) -> Iterator[Leaf]:
    if isinstance(spec, Leaf):
        yield spec
    elif isinstance(spec, tuple):
        for item in spec:
            yield from _leaves(item)
    elif isinstance(spec, _List | _Dict | _Made):
        for item in spec.items:
            yield from _leaves(item)


def skeleton(spec: Spec, *, shapes: bool) -> Any:
    """What ranks must agree on in a collective: the structure, and its shapes and dtypes where `shapes`."""
    if isinstance(spec, Leaf):
        return (spec.dtype, spec.shape) if shapes else "tensor"
    if isinstance(spec, tuple):
        return tuple([skeleton(item, shapes=shapes) for item in spec])
    if isinstance(spec, _List):
        return [skeleton(item, shapes=shapes) for item in spec.items]
    if isinstance(spec, _Dict):
        items = [(key, skeleton(item, shapes=shapes)) for key, item in zip(spec.keys, spec.items, strict=True)]
        return tuple(items) if shapes else dict(items)  # sums go by position
    if isinstance(spec, _Made):
        members = zip(spec.names, spec.items, strict=True)
        return spec.kind.__qualname__, tuple([(name, skeleton(item, shapes=shapes)) for name, item in members])
    return spec


def describe(spec: Spec) -> str:
    """The structure in words: `(float32 (3, 4), {'mask': bool (3,)})`."""
    if isinstance(spec, Leaf):
        return spec.describe()
    if isinstance(spec, tuple):
        return f"({', '.join(describe(item) for item in spec)}{',' if len(spec) == 1 else ''})"
    if isinstance(spec, _List):
        return f"[{', '.join(describe(item) for item in spec.items)}]"
    if isinstance(spec, _Dict):
        members = zip(spec.keys, spec.items, strict=True)
        return "{" + ", ".join(f"{key!r}: {describe(item)}" for key, item in members) + "}"
    if isinstance(spec, _Made):
        named = zip(spec.names, spec.items, strict=True)
        return f"{spec.kind.__qualname__}({', '.join(f'{name}={describe(item)}' for name, item in named)})"
    return "None" if spec is None else str(spec)
