"""All-reduce with a chosen algorithm: `AllReduce` where the same one is repeated, `tuned_allreduce` for any tensor at any time.

reduce = AllReduce(comm, AllReduceSpec(size=25_000_000))   # windows, buffers and plan are made once
reduce.buffer.copy_(gradient)                              # better: compute the gradient in the buffer
reduce.run()                                               # the buffer holds the sum of all ranks' buffers
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from types import TracebackType
from typing import Self, TypeVar

import torch

from tatami.collective import ALGORITHMS, Grid, Schedule, Sync, build
from tatami.comm.agreement import debugging, same_everywhere
from tatami.comm.base import AbstractCommunicator
from tatami.comm.checked import DTYPES
from tatami.comm.execute import Executor, Program
from tatami.comm.reduction import FLOAT_DTYPES, HALF_DTYPES, Reduction
from tatami.comm.staging import is_movable
from tatami.comm.tuning import choose, split_name
from tatami.errors import ClosedError, InputError

Choice = TypeVar("Choice", bound=Enum)

AUTO = "auto"
CACHED = 32
"""How many plans `tuned_allreduce` keeps for each communicator; the one that was not used for longest goes first."""


@dataclass(frozen=True, kw_only=True)
class AllReduceSpec:
    """What is to be reduced, and how: the same on all ranks.

    Attributes:
        size: elements.
        dtype: of the buffer.
        op: what is computed; its name will do.
        algorithm: a name of `tatami.collective.ALGORITHMS`, or `auto`: by the tuning table of this cluster.
        grid: (M, N) of a torus; None: follows the hosts.
        across: the algorithm of columns, or between hosts.
        sync: of puts; its name will do.
        fixed_order: sum in the same order in every run, so that results are the same to the bit.
        wire: the dtype in which values travel and are summed. None: the buffer's own, but float32 for bfloat16 and float16,
            which are then rounded once. Those two themselves: half the bytes, rounded after every addition.
    """

    size: int
    dtype: torch.dtype = torch.float32
    op: Reduction = Reduction.SUM
    algorithm: str = AUTO
    grid: Grid | None = None
    across: str = "ring"
    sync: Sync = Sync.PSCW
    fixed_order: bool = False
    wire: torch.dtype | None = None

    def __post_init__(self) -> None:
        # Names are taken for what they name: `op="mean"` compares unequal to Reduction.MEAN, and would be summed.
        object.__setattr__(self, "op", _one_of(Reduction, self.op))
        object.__setattr__(self, "sync", _one_of(Sync, self.sync))

    def check(self) -> None:
        """
        Raises:
            InputError: a size, dtype, operation or algorithm that does not exist, or that do not fit each other.
        """
        if self.size < 0:
            raise InputError(f"an all-reduce is over 0 or more elements, not {self.size}")
        for dtype in (self.dtype, self.wire or self.dtype):
            if dtype not in DTYPES:
                names = ", ".join(_name(each) for each in DTYPES)
                raise InputError(f"all-reduce: {dtype} is not reduced between ranks; convert it to one of: {names}")
        if self.op is Reduction.MEAN and self.dtype not in FLOAT_DTYPES:
            raise InputError(
                f"all-reduce: the mean of {_name(self.dtype)} is no {_name(self.dtype)}; take the sum, or convert to float"
            )
        if self.wire is not None and (self.wire not in FLOAT_DTYPES) != (self.dtype not in FLOAT_DTYPES):
            raise InputError(f"all-reduce: {_name(self.dtype)} cannot travel as {_name(self.wire)}")
        if self.algorithm != AUTO and self.algorithm not in ALGORITHMS:
            raise InputError(f"there is no all-reduce {self.algorithm!r}; choose one of: {AUTO}, {', '.join(ALGORITHMS)}")


class AllReduce:
    """One all-reduce that is repeated: its schedule, windows and buffers are made once. Collective, as all its methods are.

    Attributes:
        buffer: (size,) what this rank gives before `run`, the result after. It lies in the window that the algorithm works in,
            where it has one, so that nothing is copied; not to be touched after `close`.
        schedule: what is run.
    """

    def __init__(self, comm: AbstractCommunicator, spec: AllReduceSpec, *, hosts: Sequence[str] | None = None) -> None:
        """`hosts` groups ranks otherwise than by their hosts, for tries on one machine.

        Raises:
            InputError: an invalid specification; ranks that give different ones, with both of them; a backend without windows.
            ScheduleError: M x N is not the number of ranks; an algorithm without a fixed order; ranks of `shared` on several
                hosts.
        """
        problem: Exception | None = None
        try:
            spec.check()
        except InputError as error:
            problem = error
        check_same(comm, spec)
        if problem is not None:
            raise problem
        wire = spec.wire or (torch.float32 if spec.dtype in HALF_DTYPES else spec.dtype)
        places = tuple(hosts) if hosts is not None else comm.hosts
        self.spec = self._chosen(comm, spec, hosts=places) if spec.algorithm == AUTO else spec
        self.schedule: Schedule = build(
            self.spec.algorithm,
            ranks=comm.size,
            size=spec.size,
            hosts=places,
            grid=self.spec.grid,
            across=self.spec.across,
            sync=self.spec.sync,
            fixed_order=spec.fixed_order,
        )
        # Loads and stores sum halves in float32 block by block, so they need no second vector.
        if spec.wire is None and self.schedule.phases and self.spec.algorithm == "shared":
            wire = spec.dtype
        self._program: Program | None = executor_of(comm).prepare(self.schedule, dtype=wire, reduction=spec.op)
        # Values that travel in another dtype are converted from the user's buffer, and back into it.
        self._is_staged = wire != spec.dtype
        self.buffer = torch.zeros(spec.size, dtype=spec.dtype, device="cpu") if self._is_staged else self._program.vector

    @staticmethod
    def _chosen(comm: AbstractCommunicator, spec: AllReduceSpec, *, hosts: tuple[str, ...]) -> AllReduceSpec:
        size_bytes = spec.size * (spec.wire or spec.dtype).itemsize
        name = choose(comm, size=spec.size, size_bytes=size_bytes, hosts=hosts, fixed_order=spec.fixed_order)
        algorithm, across = split_name(name)
        return replace(spec, algorithm=algorithm, across=across)

    def run(self) -> None:
        """Reduce the buffers of all ranks into all ranks' buffer.

        Raises:
            CommTimeoutError, RankDiedError: a rank did not come; the object cannot be used any more.
            ClosedError: after `close`.
        """
        program = self._program
        if program is None:
            raise ClosedError("this AllReduce was closed; make another one")
        if not self._is_staged:
            program.run()
            return
        program.vector.copy_(self.buffer)
        program.run()
        self.buffer.copy_(program.vector)

    @property
    def algorithm(self) -> str:
        return self.schedule.algorithm

    def close(self) -> None:
        """Give windows and buffers back."""
        if self._program is not None:
            program, self._program = self._program, None
            self.buffer = self.buffer.new_empty(0)
            program.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:  # after an error the other ranks may not come to close with this one
            self.close()


def tuned_allreduce(
    tensor: torch.Tensor,
    comm: AbstractCommunicator,
    *,
    op: Reduction | str = Reduction.SUM,
    algorithm: str = AUTO,
    grid: Grid | None = None,
    across: str = "ring",
    sync: Sync | str = Sync.PSCW,
    fixed_order: bool = False,
    wire: torch.dtype | None = None,
) -> None:
    """The reduction of all ranks' `tensor` into all ranks' `tensor`, in place; of any shape and strides.

    It is copied into the buffer of an `AllReduce`, in host memory, that is kept for the next call, and back. Ranks that give
    tensors of different sizes are told so when a size is new to all of them, and always with `TATAMI_DEBUG=1`, which costs an
    exchange for each call; otherwise such a call ends by its timeout.

    Raises:
        InputError: as `AllReduce`; a tensor that is not dense.
        CommTimeoutError, RankDiedError: a rank did not come.
    """
    if not is_movable(tensor) or tensor.layout != torch.strided:
        raise InputError(f"tuned_allreduce moves dense tensors; this one is {tensor.layout} on {tensor.device}")
    spec = AllReduceSpec(
        size=tensor.numel(),
        dtype=tensor.dtype,
        op=_one_of(Reduction, op),
        algorithm=algorithm,
        grid=grid,
        across=across,
        sync=_one_of(Sync, sync),
        fixed_order=fixed_order,
        wire=wire,
    )
    plans = _plans.setdefault(comm, OrderedDict())
    if debugging():
        check_same(comm, spec, shape=tuple(tensor.shape))
    plan = plans.get(spec)
    if plan is None:
        plan = plans[spec] = AllReduce(comm, spec)
        if len(plans) > CACHED:
            plans.popitem(last=False)[1].close()
    plans.move_to_end(spec)
    values = tensor.detach()
    plan.buffer.view(values.shape).copy_(values)
    plan.run()
    values.copy_(plan.buffer.view(values.shape))


def check_same(comm: AbstractCommunicator, spec: AllReduceSpec, *, shape: tuple[int, ...] | None = None) -> None:
    """Whether all ranks ask for the same. Collective.

    Raises:
        InputError: names the first rank that differs from rank 0, and what both ask for.
    """
    facts = {each.name: getattr(spec, each.name) for each in fields(spec)}
    same_everywhere(comm, facts if shape is None else {"shape": shape, **facts}, where="all-reduce")


_executors: weakref.WeakKeyDictionary[AbstractCommunicator, Executor] = weakref.WeakKeyDictionary()
_plans: weakref.WeakKeyDictionary[AbstractCommunicator, OrderedDict[AllReduceSpec, AllReduce]] = weakref.WeakKeyDictionary()


def executor_of(comm: AbstractCommunicator) -> Executor:
    """The one of this communicator. Collective when it is asked for first."""
    if comm not in _executors:
        _executors[comm] = Executor(comm)
    return _executors[comm]


def release(comm: AbstractCommunicator) -> None:
    """Give back what `tuned_allreduce` keeps for `comm`, and its executor. Collective.

    For a communicator that is to be closed while the job goes on. `AllReduce` objects made on it must be closed before.
    """
    for plan in _plans.pop(comm, OrderedDict()).values():
        plan.close()
    executor = _executors.pop(comm, None)
    if executor is not None:
        executor.close()


def _one_of(kind: type[Choice], value: Choice | str) -> Choice:
    try:
        return kind(value)
    except ValueError as error:
        choices = ", ".join(repr(each.value) for each in kind)
        raise InputError(f"all-reduce: there is no {kind.__name__.lower()} {value!r}; choose one of {choices}") from error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
