"""Nested values and containers made of fields: every leaf travels or is changed, and every type stays."""

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from tatami import functions
from tatami.comm import AbstractCommunicator, run_threads
from tatami.comm.threads import single_communicator
from tatami.errors import ClosedError, InputError
from tatami.functions import collectives
from tatami.functions.structure import mapped, with_tensors

pytestmark = pytest.mark.ranks(2)


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


@dataclass
class Outputs:
    loss: torch.Tensor
    hidden: tuple[Any, ...]
    cache: torch.Tensor | None = None


def containers(x: torch.Tensor) -> list[Any]:
    """Of `x`, (3,)."""
    return [
        Pair(x, [x * 2]),
        Pair(x, Pair(x, None)),
        OrderedDict(b=x, a=x * 3),
        Outputs(loss=x.sum(), hidden=(x, Pair(x, x))),
        pack_sequence([x, x[:1] * 5], enforce_sorted=False),
    ]


def summed(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.sum() if value.is_floating_point() else torch.zeros(())
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, Outputs):
        value = (value.loss, value.hidden, value.cache)
    return sum((summed(each) for each in value if each is not None), torch.zeros(()))


@pytest.mark.parametrize("number", range(5))
def test_a_container_travels_and_its_gradient_comes_back(comm: AbstractCommunicator, number: int) -> None:
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    expected = containers(x)[number]
    if comm.rank == 0:
        functions.send(expected, comm, dest=1).backward()  # type: ignore[no-untyped-call]
        (wanted,) = torch.autograd.grad(summed(containers(x)[number]), x)
        assert x.grad is not None
        assert torch.equal(x.grad, wanted)
        return
    came = functions.recv(comm, source=0)
    assert type(came) is type(expected)
    if number == 4:
        padded, lengths = pad_packed_sequence(came)
        assert padded.tolist() == [[1.0, 5.0], [2.0, 0.0], [3.0, 0.0]]
        assert lengths.tolist() == [3, 1]
    else:
        assert summed(came).item() == summed(expected).item()
    if number == 2:
        assert list(came) == ["b", "a"]
    summed(came).backward()  # type: ignore[no-untyped-call]


def test_a_class_that_other_ranks_cannot_find_is_refused() -> None:
    class Local(NamedTuple):
        x: torch.Tensor

    def body(comm: AbstractCommunicator) -> None:
        with pytest.raises(InputError, match=r"Local, which other ranks cannot find; define it outside of functions"):
            functions.send(Local(torch.ones(1)), comm, dest=1 - comm.rank)

    run_threads(body, size=2)


@pytest.mark.threads_only
@pytest.mark.parametrize("kind", ["grad", "vmap"])
def test_transforms_of_torch_func_are_refused_by_name(comm: AbstractCommunicator, kind: str) -> None:
    def sent(x: torch.Tensor) -> torch.Tensor:
        return functions.send(x * 2, comm, dest=1 - comm.rank).sum()

    transform = torch.func.grad(sent) if kind == "grad" else torch.func.vmap(sent)
    with pytest.raises(InputError, match=r"send: x is inside a torch.func transform \(grad, vmap, \.\.\.\)"):
        transform(torch.ones(3))


class Both(NamedTuple):
    one: object
    other: object


class Named(OrderedDict[str, torch.Tensor]):
    """As the outputs of some libraries: keys are attributes, too, and only single items may be set."""

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        super().__setitem__(key, value)
        setattr(self, key, value)

    def update(self, *_: object, **__: object) -> None:
        raise AssertionError("outputs are not updated as a whole")


def test_every_leaf_is_changed_and_every_type_stays() -> None:
    value = {"a": [1, (2, Both(3, [4]))], "b": 5, "c": ()}
    changed = mapped(value, lambda leaf: leaf * 10)
    assert changed == {"a": [10, (20, Both(30, [40]))], "b": 50, "c": ()}
    assert type(changed["a"][1][1]) is Both
    assert value == {"a": [1, (2, Both(3, [4]))], "b": 5, "c": ()}
    assert mapped(7, lambda leaf: leaf + 1) == 8


def test_dicts_of_other_types_stay_what_they_are() -> None:
    words = defaultdict(list, {"x": [1]})
    changed = mapped(words, lambda leaf: -leaf)
    assert changed == {"x": [-1]}
    assert changed["missing"] == []
    outputs = Named()
    outputs["logits"] = torch.ones(2)
    doubled = with_tensors(outputs, lambda tensor: 2 * tensor)
    assert type(doubled) is Named
    assert doubled["logits"].tolist() == doubled.__dict__["logits"].tolist() == [2.0, 2.0]
    assert outputs["logits"].tolist() == [1.0, 1.0]


def test_only_tensors_are_given_to_what_changes_tensors() -> None:
    value = [torch.zeros(1), "text", None, (torch.ones(1), 3.0)]
    changed = with_tensors(value, lambda tensor: tensor.item() + 1)
    assert changed == [1.0, "text", None, (2.0, 3.0)]


X = torch.ones(2)


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


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": (X, [X, 3.0])}, r"x\['a'\]\[1\]\[1\] is of type builtins\.float"),
        ((X, np.ones(2)), r"x\[1\] is of type numpy\.ndarray"),
        ("text", "x is of type builtins.str"),
        ({(1, 2): X}, r"x is a dict with the key \(1, 2\)"),
        ([X, torch.eye(2).to_sparse()], r"x\[1\] is a torch\.sparse_coo tensor"),
        (torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), r"x is a quantized tensor; convert it with \.dequantize"),
        ([torch.nested.nested_tensor([X, X])], r"x\[0\] is a nested tensor; convert it with \.to_padded_tensor"),
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
