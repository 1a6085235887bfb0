"""Rows of ChainerMN's own test checklist that are not tested elsewhere, with values; see docs/from-chainermn.md."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tatami import functions
from tatami.comm import AbstractCommunicator


def ragged(rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Small integers, which every dtype holds exactly."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_gather_on_rank_0_and_backward_from_the_delegate(comm: AbstractCommunicator, dtype: torch.dtype) -> None:
    """As the reference does it: a rank other than the root runs backward on what gather returned."""
    x = ragged(comm.rank, dtype, (comm.rank + 1, comm.rank + 1))
    got: Any = functions.gather(x, comm)
    total = torch.stack([(rank + 1) * each.sum() for rank, each in enumerate(got)]).sum() if comm.rank == 0 else got
    total.backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, comm.rank + 1), rtol=0, atol=0)


@pytest.mark.ranks(2, 3, 4)
def test_retain_what_rank_0_sent_comes_back_to_it_by_its_delegate(comm: AbstractCommunicator) -> None:
    following, preceding = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.rank == 0:
        x = torch.arange(4.0, dtype=torch.float64).requires_grad_()
        delegate = functions.send(x, comm, dest=following)
        y: Any = functions.recv(comm, source=preceding, delegate=delegate)
        y.sum().backward()
        torch.testing.assert_close(x.grad, torch.full_like(x, 3.0 ** (comm.size - 1)))
    else:
        came: Any = functions.recv(comm, source=preceding)
        functions.send(3 * came, comm, dest=following).backward()  # type: ignore[no-untyped-call]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("length", [1, 2])
def test_tuples_of_one_and_two_are_relayed_as_they_are(comm: AbstractCommunicator, length: int) -> None:
    """Also one of one: nothing has to be forced."""
    last = comm.size - 1
    xs = tuple(torch.full((2, 3), float(index), requires_grad=True) for index in range(length))
    if comm.rank == 0:
        functions.send(xs, comm, dest=1)
        functions.backward()
        for index, x in enumerate(xs):
            torch.testing.assert_close(x.grad, torch.full_like(x, index + 5))
        return
    came: Any = functions.recv(comm, source=comm.rank - 1)
    assert type(came) is tuple
    assert len(came) == length
    torch.testing.assert_close([each.detach() for each in came], [x.detach() for x in xs])
    if comm.rank == last:
        torch.stack([(index + 5) * each.sum() for index, each in enumerate(came)]).sum().backward()  # type: ignore[no-untyped-call]
    else:
        functions.send(came, comm, dest=comm.rank + 1)
        functions.backward()


@pytest.mark.ranks(2, 3, 4)
def test_a_tensor_that_needs_no_gradient_can_be_sent_and_all_ranks_come_through_backward(comm: AbstractCommunicator) -> None:
    x = torch.ones(3, requires_grad=True)
    if comm.rank == 0:
        delegate = functions.send(torch.arange(3.0), comm, dest=1)
        (y,) = functions.pseudo_connect(delegate, x)
        y.sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert x.grad.tolist() == [1.0] * 3
        return
    came: Any = functions.recv(comm, source=comm.rank - 1)
    assert came.tolist() == [0.0, 1.0, 2.0]
    if comm.rank < comm.size - 1:
        functions.send(came, comm, dest=comm.rank + 1)
        functions.backward()
    else:
        (came * x).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("delegate_shape", [(3, 2), ()])
@pytest.mark.parametrize("shapes", [((4, 5), (3, 2)), ((3, 2),), ((),)])
def test_pseudo_connect_of_any_shapes(
    shapes: tuple[tuple[int, ...], ...], delegate_shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    delegate = torch.ones(delegate_shape, dtype=dtype, requires_grad=True)
    xs = [ragged(index, dtype, shape) for index, shape in enumerate(shapes)]
    ys = functions.pseudo_connect(delegate, *xs)
    assert [y.dtype for y in ys] == [dtype] * len(xs)
    for x, y in zip(xs, ys, strict=True):
        torch.testing.assert_close(y, x, rtol=0, atol=0)
    torch.stack([(index + 2) * y.sum() for index, y in enumerate(ys)]).sum().backward()  # type: ignore[no-untyped-call]
    for index, x in enumerate(xs):
        torch.testing.assert_close(x.grad, torch.full_like(x, index + 2), rtol=0, atol=0)
    torch.testing.assert_close(delegate.grad, torch.zeros_like(delegate), rtol=0, atol=0)
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(functions.pseudo_connect, (delegate, *xs))


def test_the_guide_names_tests_that_are_there() -> None:
    tests = Path(__file__).parent.parent
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (tests.parent / "docs" / "from-chainermn.md").read_text(encoding="utf-8"))
    assert len(named) > 60
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (tests / file).is_file() or f"\ndef {name}(" not in (tests / file).read_text(encoding="utf-8")
    ]
    assert missing == []


def test_the_guide_names_what_is_there() -> None:
    text = (Path(__file__).parent.parent.parent / "docs" / "from-chainermn.md").read_text(encoding="utf-8")
    ours = text.split("## What to delete")[0]
    for module, name in re.findall(r"`tatami\.(?:(train|nn|functions|comm)\.)?(\w+)", ours):
        home = importlib.import_module(f"tatami.{module}" if module else "tatami")
        assert hasattr(home, name), f"tatami.{module}.{name}"
