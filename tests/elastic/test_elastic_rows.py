"""A model among other ranks than before, without Ray: ranks as threads, of which one is left out."""

from __future__ import annotations

import copy
import threading
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from tatami.comm import run_threads
from tatami.comm.base import AbstractCommunicator
from tatami.comm.elastic import ElasticCommunicator
from tatami.errors import InputError
from tatami.membership import Held, Regroup, mirrors_of, takes
from tatami.retiling import Retiler
from tatami.tiled import ModelCheckpoint, Retiling, Trainer, tile, whole_state_dict
from tatami.tiled.mirroring import MirrorRows
from tatami.tiled.relaying import relay
from tatami.tiling import Column, Layout

NAMES = ("a", "b", "c")


def layout(*columns: tuple[str, ...]) -> Layout:
    return Layout(
        columns=tuple(
            Column(width=1 / len(columns), processors=names, heights=(1 / len(names),) * len(names)) for names in columns
        )
    )


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 11), nn.Tanh(), nn.Linear(11, 3), nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).double()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("before", "after", "dead"),
    [
        (layout(("a", "b"), ("c",)), layout(("b", "c")), "a"),
        (layout(("a", "b"), ("c",)), layout(("a",), ("b",)), "c"),
        (layout(("a",), ("b",), ("c",)), layout(("a", "c")), "b"),
    ],
)
def test_the_rows_of_one_that_is_gone_come_with_their_states(before: Layout, after: Layout, dead: str) -> None:
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    start = network()  # here: ranks that are threads would draw from one generator
    plain = copy.deepcopy(start)
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    for _ in range(4):
        step(plain, plain_optimizer, x)
    alive = tuple(name for name in NAMES if name != dead)
    together = threading.Barrier(3)

    def body(comm: AbstractCommunicator) -> dict[str, torch.Tensor]:
        name = NAMES[comm.rank]
        elastic = ElasticCommunicator(comm, names=NAMES)
        model = tile(
            copy.deepcopy(start), elastic, batch_size=6, speeds="equal", layout=renamed(before), reduction="sum", quiet=True
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(2):
            step(model, optimizer, model.local(x))
        survivors = comm.split(None if name == dead else 0, key=comm.rank)
        together.wait(60)
        if survivors is None:
            return {}
        elastic.regroup(survivors, names=alive)
        found, lost = takes(Held(layout=before), Held(layout=after), workload=model.workload, sources=alive)
        assert lost == ()
        change = Regroup(
            ticket=1, group=1, members=alive, sections=0, finish=(), outcome=None, newcomers=(), source=alive[0],
            layout=after, mirrors=mirrors_of(after, copies=1), takes=found, reason="",
        )  # fmt: skip
        cluster = type(model.cluster)(processors=tuple(each for each in model.cluster.processors if each.name in alive))
        mirror = MirrorRows(model, optimizer)
        relay(model, change, name=name, cluster=cluster, optimizer=optimizer, mirror=mirror, before=None)()
        for _ in range(2):
            step(model, optimizer, model.local(x))
        return whole_state_dict(model)

    def renamed(given: Layout) -> Layout:
        ranks = {name: f"p{rank}" for rank, name in enumerate(NAMES)}
        return Layout(
            columns=tuple(
                Column(width=c.width, heights=c.heights, processors=tuple(ranks[each] for each in c.processors))
                for c in given.columns
            )
        )

    (whole,) = [state for state in run_threads(body, size=3) if state]
    for key, tensor in plain.state_dict().items():
        torch.testing.assert_close(whole[key], tensor, rtol=1e-10, atol=1e-10)


def test_a_member_without_a_tile_gets_one_again_with_the_states_of_the_optimizer() -> None:
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    start = network()
    plain = copy.deepcopy(start)
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    for _ in range(6):
        step(plain, plain_optimizer, x)
    names = ("p0", "p1", "p2")
    layouts = [layout(("p0", "p1"), ("p2",)), layout(("p0",), ("p1",)), layout(("p2", "p0", "p1"))]

    def body(comm: AbstractCommunicator) -> dict[str, torch.Tensor]:
        elastic = ElasticCommunicator(comm, names=names)
        model = tile(
            copy.deepcopy(start), elastic, batch_size=6, speeds="equal", layout=layouts[0], reduction="sum", quiet=True
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        mirror = MirrorRows(model, optimizer)
        change: Regroup | None = None
        for ticket, (before, after) in enumerate(pairwise(layouts)):
            for _ in range(2):
                step(model, optimizer, model.local(x))
            found, lost = takes(Held(layout=before), Held(layout=after), workload=model.workload, sources=names)
            assert lost == ()
            last, change = change, Regroup(
                ticket=ticket, group=1, members=names, sections=0, finish=(), outcome=None, newcomers=(), source="p0",
                layout=after, mirrors=(), takes=found, reason="",
            )  # fmt: skip
            put_in_place = relay(
                model, change, name=model.name, cluster=model.cluster, optimizer=optimizer, mirror=mirror, before=last
            )
            put_in_place()
        assert model.tile is not None
        for _ in range(2):
            step(model, optimizer, model.local(x))
        return whole_state_dict(model)

    (whole,) = [state for state in run_threads(body, size=3) if state]
    for key, tensor in plain.state_dict().items():
        torch.testing.assert_close(whole[key], tensor, rtol=1e-10, atol=1e-10)


def test_what_does_not_follow_changes_of_the_ranks_is_refused() -> None:
    def body(inner: AbstractCommunicator) -> None:
        model = tile(network(), ElasticCommunicator(inner, names=NAMES[:2]), batch_size=4, speeds=(1, 1), reduction="mean")
        with pytest.raises(InputError, match="Retiling cannot be used in an elastic run"):
            Retiling(model, torch.optim.SGD(model.parameters(), lr=0.1), retiler=Retiler())
        sgd, x = partial(torch.optim.SGD, lr=0.1), torch.ones(4, 4, dtype=torch.float64)
        with pytest.raises(InputError, match=r"Trainer\(retile=...\) cannot be used in an elastic run"):
            Trainer(model, optimizer=sgd, loss=nn.MSELoss(), retile=Retiler())
        with pytest.raises(InputError, match=r"ModelCheckpoint\(copies=...\) cannot be used in an elastic run"):
            Trainer(model, optimizer=sgd, loss=nn.MSELoss(), checkpoint=ModelCheckpoint(dirpath=".", copies=1))
        with pytest.raises(InputError, match="no elastic run repairs it"):
            Trainer(model, optimizer=sgd, loss=nn.MSELoss()).fit((x, x[:, :2]), batch_size=4, iterations=1)

    run_threads(body, size=2)
