"""Input refused at the boundary, before anything is sent."""

from typing import Any

import numpy as np
import pytest
import torch

from tatami import functions
from tatami.comm import AbstractCommunicator
from tatami.comm.threads import single_communicator
from tatami.errors import ClosedError, InputError
from tatami.functions import collectives

X = torch.ones(2)


@pytest.mark.ranks(2)
def test_peers_and_tags(comm: AbstractCommunicator) -> None:
    with pytest.raises(InputError, match=f"send: rank {comm.rank} is this rank"):
        functions.send(X, comm, dest=comm.rank)
    with pytest.raises(InputError, match=f"recv: rank {comm.rank} is this rank"):
        functions.recv(comm, source=comm.rank)
    with pytest.raises(InputError, match="sendrecv: there is no rank 2; this communicator has ranks 0 to 1"):
        functions.sendrecv(X, comm, dest=1 - comm.rank, source=2)
    with pytest.raises(InputError, match="send: there is no rank -1"):
        functions.send(X, comm, dest=-1)
    with pytest.raises(InputError, match="send: tag -1 is not between 0 and 4294967295"):
        functions.send(X, comm, dest=1 - comm.rank, tag=-1)
    for operation in (functions.bcast, functions.gather, functions.reduce):
        with pytest.raises(InputError, match=f"{operation.__name__}: there is no rank 5"):
            operation(X, comm, root=5)
    with pytest.raises(InputError, match="scatter: there is no rank 5"):
        functions.scatter([X, X], comm, root=5)


@pytest.mark.ranks(2)
def test_parts(comm: AbstractCommunicator) -> None:
    for operation in (functions.alltoall, functions.reduce_scatter):
        with pytest.raises(InputError, match=f"{operation.__name__}: 3 parts for 2 ranks; give one for each"):
            operation([X] * 3, comm)
        with pytest.raises(InputError, match=f"{operation.__name__}: xs is a Tensor; give a tuple or list"):
            operation(X, comm)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="scatter: 1 parts for 2 ranks"):
        functions.scatter([X], comm, root=comm.rank)
    with pytest.raises(InputError, match="scatter: xs is a NoneType"):
        functions.scatter(None, comm, root=comm.rank)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": (X, [X, 3.0])}, r"x\['a'\]\[1\]\[1\] is of type builtins\.float"),
        ((X, np.ones(2)), r"x\[1\] is of type numpy\.ndarray"),
        ("text", "x is of type builtins.str"),
        ({(1, 2): X}, r"x is a dict with the key \(1, 2\)"),
        ([X, torch.eye(2).to_sparse()], r"x\[1\] is a torch\.sparse_coo tensor"),
        ({"m": torch.ones(2, device="meta")}, r"x\['m'\] is on meta, where a tensor has a shape and no values"),
    ],
)
def test_unsupported_members_are_named_with_their_path(comm: AbstractCommunicator, value: object, message: str) -> None:
    with pytest.raises(InputError, match=f"send: {message}"):
        functions.send(value, comm, dest=1 - comm.rank)
    with pytest.raises(InputError, match=f"allgather: {message}"):
        functions.allgather(value, comm)


@pytest.mark.ranks(1, 2)
def test_closed_communicator(comm: AbstractCommunicator) -> None:
    part = comm.split(0)
    assert part is not None
    part.close()
    with pytest.raises(ClosedError):
        functions.allgather(X, part)
    if comm.size > 1:
        with pytest.raises(ClosedError):
            functions.send(X, part, dest=1 - comm.rank)
        with pytest.raises(ClosedError):
            functions.recv(part, source=1 - comm.rank)


def test_backward_of_nothing_does_nothing() -> None:
    functions.backward()
    functions.backward(comm=single_communicator())
    assert functions.grad(None, ()) == ()
    functions.backward(torch.ones(()))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", sorted(collectives.CALLS))
def test_the_order_of_chainermns_arguments_is_told(comm: AbstractCommunicator, name: str) -> None:
    function: Any = getattr(functions, name)
    x = torch.ones(2) if name not in {"scatter", "alltoall", "reduce_scatter"} else [torch.ones(2)] * comm.size
    kind = type(x).__name__
    with pytest.raises(InputError, match=rf"{name} got a {kind} as the second argument; call {name}\(xs?, comm"):
        function(comm, x)
    with pytest.raises(InputError, match=rf"{name} got 3 arguments without names; .*ChainerMN's order \(comm, xs?"):
        function(comm, x, 0)
    with pytest.raises(InputError, match=rf"{name} got 3 arguments without names"):
        function(x, comm, 0)
    function(x, comm)
