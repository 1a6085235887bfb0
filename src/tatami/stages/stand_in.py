"""A stand-in: a tensor with shape, dtype and autograd, whose values are on another stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from tatami.errors import ModelError

_aten = torch.ops.aten
_LOOKS = frozenset({_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default})
"""Operations that hand a value to Python."""
_INDEXING = frozenset({_aten.index.Tensor, _aten._unsafe_index.Tensor, _aten.index_put.default, _aten.index_put_.default,
                       _aten._index_put_impl_.default})  # fmt: skip
_KEPT = 4096
_known: dict[Any, Any] = {}
"""What operations return on the meta device, by the form of what they are given: many take a millisecond there, in Python."""


class StandIn(torch.Tensor):
    """Computes shapes and nothing else: every operation on it runs on torch's meta device and returns stand-ins again.

    It says that it is on the device of the tensor it stands for, so that `torch.arange(..., device=x.device)` makes an ordinary
    tensor.
    """

    meta: torch.Tensor

    @staticmethod
    def __new__(cls, meta: torch.Tensor, *, device: torch.device, requires_grad: bool = False) -> Self:
        made = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device, requires_grad=requires_grad
        )
        made.meta = meta
        return made

    def __init__(self, meta: torch.Tensor, *, device: torch.device, requires_grad: bool = False) -> None:
        pass

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"StandIn({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        raise _not_here()

    def numpy(self, **_: Any) -> Any:
        raise _not_here()

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        return StandIn(self.meta, device=self.device, requires_grad=self.requires_grad)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _LOOKS:
            raise _not_here()
        kwargs = kwargs or {}
        if func in _INDEXING:  # by a mask that is here: how many elements it takes decides the shape
            args = (args[0], [part for index in args[1] for part in _places(index)], *args[2:])
        if func._schema.is_mutable and any(map(_is_real, _written(func, args, kwargs))):
            raise ModelError(
                f"{func} would write a value that another stage computes into a tensor that is here. If it is the gradient of "
                "a weight outside of the network (a learned weight of the loss, a layer behind the network), give tatami.tile "
                "a network that has it; otherwise cut elsewhere (layout=), or use one stage"
            )
        if torch.Tag.inplace_view in func.tags and isinstance(args[0], StandIn):
            # Another form of the same tensor, as torch's LSTM asks for: both layers have it; what is known stays as it is.
            with no_dispatch():
                func(*args, **kwargs)
            args[0].meta = args[0].meta.detach()
            func(args[0].meta, *args[1:], **kwargs)
            return args[0]
        given = args if any(isinstance(each, StandIn) for each in args) else pytree.tree_leaves((args, kwargs))
        device = next(each.device for each in given if isinstance(each, StandIn))
        key = None if func._schema.is_mutable else (func, form_of(args), form_of(tuple(kwargs.items())))
        out = None if key is None else _known.get(key)
        if out is None:
            try:
                out = func(*pytree.tree_map(_to_meta, args), **pytree.tree_map(_to_meta, kwargs))
            except NotImplementedError as error:
                raise ModelError(
                    f"{func}: the shape of its result depends on values that another stage computes and that are not here. "
                    "Where it chooses by a mask, take one of the inputs or targets, or multiply by it; for others, such "
                    "as CTCLoss, use one stage"
                ) from error
            except ZeroDivisionError:  # in torch's gradient of a mean over no sample, which is like the input
                out = _to_meta(args[1]).clone()
            if key is not None:
                if len(_known) >= _KEPT:
                    _known.clear()
                _known[key] = out
        if func._schema.is_mutable and isinstance(args[0], StandIn):
            return args[0] if isinstance(out, torch.Tensor) else out
        if isinstance(out, torch.Tensor):
            return StandIn(out, device=device)
        return pytree.tree_map_only(torch.Tensor, lambda meta: StandIn(meta, device=device), out)


def _not_here() -> ModelError:
    return ModelError(
        "this value is computed by the ranks of another stage, and is not here: the loss and the network's results are on the "
        "last stage. model.global_loss(loss), called on all ranks, gives each of them that of the whole batch"
    )


def _places(index: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """An index by numbers in place of one by a mask."""
    is_mask = index is not None and index.dtype in (torch.bool, torch.uint8) and _is_real(index)
    return index.nonzero(as_tuple=True) if is_mask and index is not None else (index,)


def form_of(given: Any) -> Any:
    """The part of an operation's arguments that decides the form of its result: all but the values of tensors."""
    if isinstance(given, torch.Tensor):
        return given.shape, given.stride(), given.dtype, given.device, isinstance(given, StandIn)
    if type(given) in (tuple, list):
        return type(given), tuple([form_of(each) for each in given])
    if given is None or type(given) in (int, float, bool, str):
        return type(given), given
    leaves, structure = pytree.tree_flatten(given)
    if len(leaves) == 1 and leaves[0] is given:
        return repr(given)
    return str(structure), tuple([form_of(each) for each in leaves])


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation changes in place."""
    named = zip(func._schema.arguments, args, strict=False)
    written = [value for argument, value in named if argument.alias_info is not None and argument.alias_info.is_write]
    written += [
        kwargs[argument.name]
        for argument in func._schema.arguments[len(args) :]
        if argument.name in kwargs and argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, torch.Tensor)]


def _is_real(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, StandIn) and tensor.device.type != "meta"


def _to_meta(value: Any) -> Any:
    if isinstance(value, StandIn):
        return value.meta
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def without_values(tree: Any) -> Any:
    """`tree` with a stand-in, which leads nowhere, for every tensor."""
    return pytree.tree_map_only(torch.Tensor, stand_in_of, tree)


def stand_in_of(tensor: torch.Tensor) -> StandIn:
    """A stand-in of the same shape and dtype, which leads nowhere."""
    if isinstance(tensor, StandIn):
        return StandIn(tensor.meta, device=tensor.device)
    return StandIn(torch.empty_like(tensor, device="meta", requires_grad=False), device=tensor.device)


def has_stand_in(tree: Any) -> bool:
    """Whether there is a stand-in among the tensors of `tree`."""
    return any(isinstance(leaf, StandIn) for leaf in pytree.tree_leaves(tree))


class Follows(torch.autograd.Function):
    """Stand-ins that are computed from other tensors: backward leads to these, so that it reaches what was handed over."""

    @staticmethod
    def forward(ctx: Any, made: Callable[[], list[torch.Tensor]], *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.ends = [stand_in_of(source) for source in sources]
        return tuple(made())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ARG004
        return None, *ctx.ends


def following(leaves: list[torch.Tensor], sources: list[torch.Tensor]) -> list[torch.Tensor]:
    """Stand-ins like `leaves`, from which backward leads to all `sources`; those that cannot have a gradient as they are."""
    floating = [i for i, leaf in enumerate(leaves) if leaf.is_floating_point() or leaf.is_complex()]
    if not floating or not sources:
        return leaves
    made = Follows.apply(lambda: [stand_in_of(leaves[i]) for i in floating], *sources)  # type: ignore[no-untyped-call]
    found = list(leaves)
    for i, each in zip(floating, made, strict=True):
        found[i] = each
    return found
