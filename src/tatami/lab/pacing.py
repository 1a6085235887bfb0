"""A rank that lasts as long as its host would: it computes at full speed, then waits until its host would be done.

A model says how long an operation takes its host: its flop, and so many flop for each byte that it reads and writes, at the
host's speed. So a product of large matrices is nearly as fast as the host can be, a small one takes longer for each flop, and
any other operation takes the time of its bytes. As long as this machine does the real work in less time than all hosts
together would take, times do not depend on how busy it is.

Python has to look at each operation, which takes longer than a small operation itself. That is time of the instrument, not of
the host: a rank that is behind by no more than that makes up for it in later waits, so that a program of many small operations
is as fast here as its host would be.

What it cannot show: caches, memory that ranks of a host share, and whatever does not pass through torch's operations: Python
between them counts only where it is slower than the model, and messages take the time that they take on this machine.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_SLACK_S = 1e-3
"""Operations that follow each other within this time follow at once: a wait is longer, Python is shorter."""
_LEAST_WAIT_S = 2e-4
_CROSSING_S = 5e-6
"""What dispatching to this mode and returning from it costs per operation, on top of what is timed here."""
_LOOKS_S = 0.1
"""Between two looks at the file that says how fast the host is."""
_LATE = 0.02
"""Share of the modelled time above which lateness is reported."""


class Pacing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, each operation of this thread lasts as long as it would on the host.

    Args:
        file: holds the host's speed in flop/s, and how many flop it could do while it moves a byte; may be written again.
        clock, wait: seconds, and how to let some pass.

    Attributes:
        modelled_s: that the host has computed.
        late_s: by which this machine was slower than the host, in all.
    """

    def __init__(
        self, file: Path, *, clock: Callable[[], float] = time.monotonic, wait: Callable[[float], None] = time.sleep
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._file, self._clock, self._wait = file, clock, wait
        self._read()
        self._due_s = self._looked_s = self._left_s = clock()
        self._behind_s = 0.0
        self.modelled_s = self.late_s = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and being skipped costs 2 us per operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began_s = self._clock()
        if began_s > self._left_s + _SLACK_S:
            self._behind_s = 0.0  # whatever the rank waited for, it was there in time
        result = func(*args, **(kwargs or {}))
        done_s = self._clock()
        flop = operation_flop(func, args, kwargs or {}, result, balance=self._balance)
        if flop and self._last(flop, began_s, done_s):
            self._behind_s, self._left_s = 0.0, self._clock()
        else:
            self._left_s = self._clock()
            self._behind_s += self._left_s - done_s + _CROSSING_S
        return result

    def _last(self, flop: float, began_s: float, done_s: float) -> bool:
        """What really ran from `began_s` to `done_s` lasts as long as it would on the host. Whether the rank is in time now."""
        if done_s > self._looked_s + _LOOKS_S:
            self._looked_s = done_s
            self._read()
        last_s = flop * self._flop_s
        # The host begins when it has done what was before; after a wait, now. It does not look at operations.
        begins_s = began_s - self._behind_s
        self._due_s = last_s + (self._due_s if begins_s < self._due_s + _SLACK_S else begins_s)
        self.modelled_s += last_s
        if done_s >= self._due_s:
            self.late_s += min(max(done_s - self._due_s - self._behind_s, 0.0), done_s - began_s)
            return False
        if self._due_s > done_s + _LEAST_WAIT_S:
            self._wait(self._due_s - done_s)
        return True

    def _read(self) -> None:
        speed, balance = self._file.read_text(encoding="ascii").split()
        self._flop_s, self._balance = 1 / float(speed), float(balance)

    def tell(self, rank: int) -> None:
        """Say so where this machine was slower than the host that it plays."""
        if self.late_s > _LATE * max(self.modelled_s, 1e-9):
            print(
                f"rank {rank}: this machine was {self.late_s:.2g} s later than the host that it plays would be, which computed "
                f"for {self.modelled_s:.2g} s: times are too long. Play slower hosts (--dilate), or fewer",
                file=sys.stderr,
                flush=True,
            )


def operation_flop(func: Any, args: Any, kwargs: Any, result: Any, *, balance: float) -> float:
    """What an operation costs its host: its flop, and those that take as long as its bytes; 0 where it computes nothing."""
    if getattr(func, "namespace", None) != "aten":
        return 0.0
    inputs, outputs = [*_tensors(args), *_tensors(kwargs.values())], list(_tensors((result,)))
    if not outputs or any(type(each) not in (torch.Tensor, torch.nn.Parameter) or each.is_meta for each in (*inputs, *outputs)):
        return 0.0  # what is traced is not computed
    is_mutable, count = _formula(func)
    if not is_mutable:
        places = {_place(each) for each in inputs}
        if all(_place(each) in places for each in outputs):
            return 0.0  # a view
    size_bytes = sum(each.nbytes for each in (*inputs, *outputs))
    flop = 0.0 if count is None else float(count(*_shapes(args), **kwargs, out_shape=_shapes(result)))
    return flop + balance * size_bytes


@functools.cache
def _formula(func: Any) -> tuple[bool, Callable[..., Any] | None]:
    """Whether an operation writes into its inputs, and torch's count of its flop."""
    # A product that is added to what is there (`addmm_`), and attention for CPUs, count as the forms that torch lists.
    name = func._overloadpacket.__name__.rstrip("_").replace("_for_cpu", "")
    count = flop_registry.get(getattr(torch.ops.aten, name, None))
    return func._schema.is_mutable, getattr(count, "__wrapped__", None)  # the formula itself takes shapes in place of tensors


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape
    return tuple(_shapes(each) for each in value) if isinstance(value, (list, tuple)) else value


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of an operation, or in lists of them. A fifth of the time of `torch.utils._pytree`."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)
