"""What a forward pass keeps for its backward pass: memory in bytes, as autograd's own hooks see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Kept:
    """One piece of memory.

    Attributes:
        size_bytes: of all of it, whatever part of it is looked at.
        last_axis: the length of the last axis of what was kept there first.
        has_gradient: whether its gradient may pass in the backward pass: not of integers, such as a library's work space.
    """

    size_bytes: int
    last_axis: int
    has_gradient: bool = True


class Keeping:
    """Sees what is kept; each piece of memory counts once.

    Args:
        outside: tensors that are there anyway: weights, and what a network is called with.
        double_bytes: what an element of double precision counts: tests run in it what is trained otherwise.
        drops: the pass has no backward pass, and what it would need is seen and dropped.

    Attributes:
        was_asked: whether there was a backward pass after all, which failed.
    """

    def __init__(self, outside: Iterable[Any], *, double_bytes: int = 8, drops: bool = False) -> None:
        self._outside = {_place(tensor) for tensor in outside if isinstance(tensor, torch.Tensor)}
        self._double_bytes = double_bytes
        self._drops = drops
        self.was_asked = False
        self.found: dict[int, Kept] = {}
        """By place, in the order of the pass."""
        self.size_bytes = 0
        """Size of all that is kept, in bytes."""
        self._held: list[StorageWeakRef] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A forward pass inside of it is seen."""
        with torch.autograd.graph.saved_tensors_hooks(self._keep, self._given_back):
            yield

    def is_outside(self, tensor: torch.Tensor) -> bool:
        """Whether this memory is there anyway, or lies nowhere."""
        place = _place(tensor)
        return not place or place in self._outside

    def _given_back(self, tensor: torch.Tensor | None) -> torch.Tensor:
        if tensor is None:
            self.was_asked = True
            raise RuntimeError("the values that this backward pass needs were dropped")
        return tensor

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor | None:
        with torch._C.DisableTorchFunction():  # what looks at the user's operations is not to see these
            place = _place(tensor)
            if place and place not in self._outside and place not in self.found:
                size_bytes = tensor.untyped_storage().nbytes()
                if tensor.dtype is torch.float64:
                    size_bytes = size_bytes // 8 * self._double_bytes
                # What the pass drops again, such as a norm for its log, would leave its place to another tensor or not, as the
                # allocator likes, and ranks would count differently. A weak reference keeps the place, and not the memory.
                self._held.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
                last_axis = tensor.shape[-1] if tensor.dim() else 1
                has_gradient = tensor.is_floating_point() or tensor.is_complex()
                self.size_bytes += size_bytes
                self.found[place] = Kept(size_bytes=size_bytes, last_axis=last_axis, has_gradient=has_gradient)
            return None if self._drops else tensor.detach()  # the tensor itself would hold its own graph forever


def forward_alone(outside: Iterable[Any], run: Callable[[Keeping], Result]) -> Result:
    """What a forward pass gives that no backward pass follows: nothing is kept for one, which is most of a pass's memory.

    Where the network goes backward itself (forces are gradients that a forward pass takes), the pass is repeated with all kept.

    Args:
        outside: see `Keeping`.
        run: makes the pass while it is watched; is called once more where the pass is to be repeated.
    """
    outside = list(outside)
    keeping = Keeping(outside, drops=True)
    try:
        result = run(keeping)
    except Exception:  # of the network, which may have failed because of what was dropped
        if not keeping.was_asked:
            raise
    else:
        if not keeping.was_asked:
            return result
    return run(Keeping(outside))


def _place(tensor: torch.Tensor) -> int:
    """Which memory it has; 0 for tensors that have none of their own."""
    if tensor.layout is not torch.strided or not tensor.untyped_storage().data_ptr():
        return 0
    return int(tensor.untyped_storage()._cdata)


class KeepingRun(fx.Interpreter):
    """Runs a program, and finds out which of its operations made what is kept.

    Attributes:
        sizes_bytes: of what each operation made.
    """

    def __init__(self, graph: fx.GraphModule, outside: Iterable[Any]) -> None:
        super().__init__(graph, garbage_collect_values=False)  # memory that is given back could be taken for another tensor's
        self._keeping = Keeping(outside)
        self._made: dict[int, fx.Node] = {}
        self.sizes_bytes: dict[fx.Node, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        known = len(self._keeping.found)
        with self._keeping.watched():
            result = super().run_node(n)
        for place, kept in list(self._keeping.found.items())[known:]:
            maker = self._made.get(place, n)
            self.sizes_bytes[maker] = self.sizes_bytes.get(maker, 0) + kept.size_bytes
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._made.setdefault(_place(tensor), n)
        return result
