"""Calls in ChainerMN's order, which is another one: told in one sentence, before anything moves."""

from __future__ import annotations

from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError

CALLS = {
    "bcast": ("x, comm, root=0", "comm, x, root"),
    "gather": ("x, comm, root=0", "comm, x, root"),
    "scatter": ("xs, comm, root=0", "comm, xs, root"),
    "allgather": ("x, comm", "comm, x"),
    "alltoall": ("xs, comm", "comm, xs"),
    "allreduce": ("x, comm", "comm, x"),
    "reduce": ("x, comm, root=0", "comm, x, root"),
    "reduce_scatter": ("xs, comm", "comm, xs"),
}
"""Our arguments, and the order of ChainerMN's."""


def check_order(operation: str, comm: AbstractCommunicator, extra: tuple[object, ...]) -> None:
    """Whether the second argument is the communicator, and the last that is not named.

    Raises:
        InputError: it is not.
    """
    if not extra and isinstance(comm, AbstractCommunicator):
        return
    ours, chainermns = CALLS[operation]
    given = f"{2 + len(extra)} arguments without names" if extra else f"a {type(comm).__name__} as the second argument"
    raise InputError(f"{operation} got {given}; call {operation}({ours}), which is not ChainerMN's order ({chainermns})")
