"""Differentiable send and recv against bare mpi4py and against torch.distributed over gloo, in turn:

    tatami run -n 2 benchmarks/bench_functions.py

A round trip: rank 0 sends a tensor, rank 1 sends it back, and the gradients take the same way backwards. That is four messages
one after the other, so the rivals do two round trips of bare messages of the same size, which know no gradients. What autograd
alone takes on each rank for its two functions and their backward, of which nothing is sent, is measured beside them.

A model-parallel step is a network of two halves, one on each rank, forward and backward. No rank can begin before the other has
sent, so its bound is the computation of both halves and the two bare messages, each measured alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import nn

import tatami
from tatami import functions
from tatami.bench.interleaved import Contestant, measured, start_gloo, times
from tatami.comm.base import AbstractCommunicator
from tatami.comm.session import load_mpi
from tatami.errors import InputError

KIB, MIB = 1024, 1024**2
SIZES_BYTES = (8, KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB)
ELEMENT_BYTES = 4
TATAMI, MPI, GLOO, AUTOGRAD = "tatami", "mpi4py", "gloo", "autograd"
MLP = (784, 1000, 1000, 10)
BATCH_SIZE = 256
STEP, FIRST_HALF, SECOND_HALF, MESSAGES = "step", "first half", "second half", "messages"


@dataclass(frozen=True, kw_only=True)
class FunctionsBenchmark:
    """What is measured.

    Attributes:
        sizes_bytes: of the messages, whole float32.
        rounds: timings of each contestant, whose median counts.
        seconds: about how long one timing takes.
    """

    sizes_bytes: tuple[int, ...] = SIZES_BYTES
    rounds: int = 7
    seconds: float = 0.05

    def check(self, *, ranks: int) -> None:
        """
        Raises:
            InputError: not two ranks, or a size that is not a whole number of float32.
        """
        if ranks != 2:
            raise InputError(f"a round trip is measured between 2 ranks, not {ranks}")
        for size_bytes in self.sizes_bytes:
            if size_bytes < ELEMENT_BYTES or size_bytes % ELEMENT_BYTES:
                raise InputError(
                    f"a message is a whole number of float32, of {ELEMENT_BYTES} bytes each; not {size_bytes} bytes"
                )


def bench_functions(benchmark: FunctionsBenchmark, comm: AbstractCommunicator) -> Iterator[dict[str, Any]]:
    """One record for each size, by rising size, then one for the model-parallel step; the same on both ranks. Collective.

    Keys of a round trip: `benchmark`, `size_bytes`, and of `tatami`, `mpi4py`, `gloo` and `autograd` its `_median_s` and its
    `_spread`, (slowest - fastest round) / median. Keys of the step: `benchmark`, `net`, `batch_size`, `step_median_s`,
    `bound_s` and its three parts.

    Raises:
        InputError: as `FunctionsBenchmark.check`.
    """
    benchmark.check(ranks=comm.size)
    mpi = load_mpi(timeout_s=comm.timeout_s).COMM_WORLD.Dup()
    start_gloo(comm)
    try:
        for size_bytes in sorted(set(benchmark.sizes_bytes)):
            tensor = torch.ones(size_bytes // ELEMENT_BYTES)
            contestants = {
                TATAMI: _round_trip(comm, tensor),
                MPI: _bare(mpi, tensor),
                GLOO: _gloo(comm, tensor),
                AUTOGRAD: _autograd(tensor),
            }
            yield {
                "benchmark": "functions",
                "size_bytes": size_bytes,
                **_flattened(measured(contestants, comm, rounds=benchmark.rounds, seconds=benchmark.seconds)),
            }
        yield _step_record(benchmark, comm, mpi)
    finally:
        torch.distributed.destroy_process_group()
        mpi.Free()


def _flattened(timed: dict[str, dict[str, float]]) -> dict[str, float]:
    return {f"{name.replace(' ', '_')}_{key}": value for name, facts in timed.items() for key, value in facts.items()}


def _round_trip(comm: AbstractCommunicator, tensor: torch.Tensor) -> Contestant:
    x = tensor.clone().requires_grad_()

    def run(times: int) -> None:
        for _ in range(times):
            if comm.rank == 0:
                x.grad = None
                functions.send(x, comm, dest=1)
                functions.backward(functions.recv(comm, source=1))
            else:
                functions.send(functions.recv(comm, source=0), comm, dest=0)
                functions.backward()

    return run


def _bare(mpi: Any, tensor: torch.Tensor) -> Contestant:
    buffer = tensor.clone().numpy()
    return _two_round_trips(mpi.Get_rank(), lambda: mpi.Send(buffer, 1 - mpi.Get_rank()), lambda: mpi.Recv(buffer))


def _gloo(comm: AbstractCommunicator, tensor: torch.Tensor) -> Contestant:
    buffer, peer = tensor.clone(), 1 - comm.rank
    return _two_round_trips(
        comm.rank, lambda: torch.distributed.send(buffer, peer), lambda: torch.distributed.recv(buffer, peer)
    )


class _Passed(torch.autograd.Function):
    """Two tensors in, two out, as a function of communication has: a token, and what is moved."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return token.clone(), x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ARG004
        return None, grads[1]


def _autograd(tensor: torch.Tensor) -> Contestant:
    x, token = tensor.clone().requires_grad_(), torch.zeros((), requires_grad=True)
    seed = torch.ones((), dtype=x.dtype).expand(x.shape)
    apply: Any = super(torch.autograd.Function, _Passed).apply

    def once() -> None:
        x.grad = None
        last, received = apply(*apply(token, x))
        torch.autograd.Variable._execution_engine.run_backward(
            (received, last), (seed, torch.zeros(())), False, False, (), allow_unreachable=True, accumulate_grad=True
        )

    return times(once)


def _two_round_trips(rank: int, send: Callable[[], object], recv: Callable[[], object]) -> Contestant:
    first, then = (send, recv) if rank == 0 else (recv, send)

    def run(times: int) -> None:
        for _ in range(2 * times):
            first()
            then()

    return run


def _step_record(benchmark: FunctionsBenchmark, comm: AbstractCommunicator, mpi: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    first, second = nn.Linear(MLP[0], MLP[1]), nn.Sequential(nn.Linear(MLP[1], MLP[2]), nn.Tanh(), nn.Linear(MLP[2], MLP[3]))
    x = torch.randn(BATCH_SIZE, MLP[0], generator=generator)
    hidden = torch.randn(BATCH_SIZE, MLP[1], generator=generator)

    def lower() -> torch.Tensor:
        first.zero_grad()
        hidden: torch.Tensor = torch.tanh(first(x))
        return hidden

    def upper(hidden: torch.Tensor) -> None:
        second.zero_grad()
        loss: torch.Tensor = second(hidden).pow(2).mean()
        torch.autograd.backward(loss)

    def step() -> None:
        if comm.rank == 0:
            functions.send(lower(), comm, dest=1)
            functions.backward()
        else:
            upper(functions.recv(comm, source=0))

    def first_half() -> None:
        if comm.rank == 0:
            torch.autograd.backward(lower(), hidden)

    def second_half() -> None:
        if comm.rank == 1:
            upper(hidden.clone().requires_grad_())

    buffer, peer = hidden.clone().numpy(), 1 - comm.rank

    def messages() -> None:
        if comm.rank == 0:
            mpi.Send(buffer, peer)
            mpi.Recv(buffer, peer)
        else:
            mpi.Recv(buffer, peer)
            mpi.Send(buffer, peer)

    parts = {STEP: step, FIRST_HALF: first_half, SECOND_HALF: second_half, MESSAGES: messages}
    contestants = {name: times(part) for name, part in parts.items()}
    timed = measured(contestants, comm, rounds=benchmark.rounds, seconds=4 * benchmark.seconds)
    return {
        "benchmark": "functions-step",
        "net": "-".join(map(str, MLP)),
        "batch_size": BATCH_SIZE,
        **_flattened(timed),
        "bound_s": sum(timed[name]["median_s"] for name in (FIRST_HALF, SECOND_HALF, MESSAGES)),
    }


def main() -> None:
    # Several threads of torch in each rank would share cores with the other rank.
    os.environ.setdefault("TATAMI_THREADS", "1")
    comm = tatami.init()
    for record in bench_functions(FunctionsBenchmark(), comm):
        if comm.rank == 0:
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
