"""Nested values and containers made of fields: every leaf travels or is changed, and every type stays."""

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from tatami import functions
from tatami.comm import AbstractCommunicator, run_threads
from tatami.errors import InputError
from tatami.functions.structure import mapped, with_tensors


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


@pytest.mark.ranks(2)
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


@pytest.mark.parametrize("kind", ["grad", "vmap"])
def test_transforms_of_torch_func_are_refused_by_name(kind: str) -> None:
    def body(comm: AbstractCommunicator) -> None:
        def sent(x: torch.Tensor) -> torch.Tensor:
            return functions.send(x * 2, comm, dest=1 - comm.rank).sum()

        transform = torch.func.grad(sent) if kind == "grad" else torch.func.vmap(sent)
        with pytest.raises(InputError, match=r"send: x is inside a torch.func transform \(grad, vmap, \.\.\.\)"):
            transform(torch.ones(3))

    run_threads(body, size=2)


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
