"""Gradients that leave while earlier blocks compute. That they are exact, and as described, is in the tests of both."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from pretend_device import DEVICE, PretendDevice
from tatami.cluster import Cluster, Processor
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError, ModelError, PlanError
from tatami.testing.worlds import World
from tatami.tiled import Trainer, bucket_choice, tile
from tatami.tiled.departing import Departures
from tatami.tiling import AlphaBetaCost, hiding_pays
from tatami.tiling.bounds import time_bound_s
from tatami.tiling.traffic import departures
from tatami.workload import Workload, net_workload
from tiled_rig import Placed, assert_close, gradients, hosts_of, simple_layout, tiled, whole_gradients

SIZES = (4, 6, 5, 7, 3, 6, 2)
"""Three pairs."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = []
    for inputs, outputs in pairwise(SIZES):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers).double()


def batch() -> torch.Tensor:
    return torch.rand(9, SIZES[0], generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def wanted() -> dict[str, torch.Tensor | None]:
    plain = network()
    torch.autograd.backward(plain(batch()).square().mean())
    return gradients(plain)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 4)
def test_messages_are_gone_before_earlier_blocks_compute(world: World) -> None:
    """Of three blocks with a bucket each: none when backward begins, those of two when it comes to the first one."""
    built, expected = network(), wanted()

    def body(comm: AbstractCommunicator) -> None:
        row = simple_layout(*([rank] for rank in range(comm.size)))
        placed = Placed(comm, hosts=hosts_of(comm.size, "apart"))
        model = tiled(built, placed, layout=row, batch_size=9, bucket_bytes=1)
        assert isinstance(model.comm, Placed)
        seen: list[int] = []
        for index in (5, 3, 1):  # each behind a tanh: between two pairs, or inside of one
            model.module.get_submodule(str(index)).register_full_backward_hook(
                lambda *_, calls=model.comm.calls: seen.append(sum(call.operation == "isend" for call in calls))
            )
        model.comm.calls.clear()
        torch.autograd.backward(model(model.local(batch())).square().mean())
        assert_close(whole_gradients(model), expected, what="gradients")
        # The last pair has left when backward comes to what lies before it, and so on.
        assert seen[-1] >= 2 * (comm.size - 1)
        assert seen == sorted(seen)

    world(body)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_a_pass_that_is_interrupted_leaves_nothing_for_the_next(world: World) -> None:
    built, expected = network(), wanted()

    def body(comm: AbstractCommunicator) -> None:
        row = simple_layout(*([rank] for rank in range(comm.size)))
        model = tiled(built, comm, layout=row, batch_size=9, bucket_bytes=1)

        def fail(*_: object) -> None:
            raise KeyError("on purpose")

        for at in (1, 3):
            hook = model.module.get_submodule(str(at)).register_full_backward_hook(fail)
            with pytest.raises(KeyError, match="on purpose"):
                # Gradients of the last pair are on their way, of another scale.
                torch.autograd.backward(model(model.local(batch())).square().mean() * (2 + comm.rank))
            hook.remove()
            model.zero_grad()
            torch.autograd.backward(model(model.local(batch())).square().mean())
            assert_close(whole_gradients(model), expected, what="gradients")
            model.zero_grad()

    world(body)


@pytest.mark.ranks(2)
def test_blocks_that_backward_never_comes_to_leave_at_its_end(world: World) -> None:
    built = network()

    def body(comm: AbstractCommunicator) -> None:
        model = tiled(built, comm, layout=simple_layout([0], [1]), batch_size=9, bucket_bytes=1)
        cut = model.module.get_submodule("7").register_forward_hook(lambda *given: given[-1].detach())
        output = model(model.local(batch()))
        torch.autograd.backward(output.square().mean())
        assert model.module.get_submodule("0").get_parameter("weight").grad is None
        assert model.module.get_submodule("8").get_parameter("weight").grad is not None
        cut.remove()

    world(body)


@pytest.mark.ranks(2)
def test_a_first_call_without_gradients_loses_none(world: World) -> None:
    built, expected = network(), wanted()

    def body(comm: AbstractCommunicator) -> None:
        model = tiled(built, comm, layout=simple_layout([0], [1]), batch_size=9, bucket_bytes=1)

        def look(*_: object) -> None:
            with torch.no_grad():
                model.module.get_submodule("8")(torch.zeros(1, SIZES[4], dtype=torch.float64))

        model.module.get_submodule("0").register_forward_pre_hook(look)
        torch.autograd.backward(model(model.local(batch())).square().mean())
        assert_close(whole_gradients(model), expected, what="gradients")

    world(body)


@pytest.mark.ranks(2)
def test_a_parameter_that_is_read_before_its_module_is_called_is_named(world: World) -> None:
    built = network()

    def body(comm: AbstractCommunicator) -> None:
        model = tiled(built, comm, layout=simple_layout([0], [1]), batch_size=9, bucket_bytes=1)
        last = model.module.get_submodule("8")

        def early(_: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            weight = last._parameters["weight"]
            assert weight is not None
            return (inputs[0] + weight.sum(),)

        model.module.get_submodule("0").register_forward_pre_hook(early)
        with pytest.raises(ModelError, match=r"8\.weight is read before its module is called.*bucket_bytes=None"):
            torch.autograd.backward(model(model.local(batch())).square().mean())

    world(body)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_sums_have_the_same_bits_in_any_buckets(world: World, wire: str | None) -> None:
    """Also rounded on their way, over several batches whose last one is smaller, and beside the sum of the loss."""
    built, x = network(), batch()

    def body(comm: AbstractCommunicator) -> None:
        placed = Placed(comm, hosts=hosts_of(comm.size, "apart"))
        row = simple_layout(*([rank] for rank in range(comm.size)))
        for layout in (row, simple_layout([0, 1], range(2, comm.size))) if comm.size > 2 else (row,):
            trained = []
            for bucket_bytes in (None, 1, 500):
                model = tiled(built, placed, layout=layout, batch_size=4, wire=wire, bucket_bytes=bucket_bytes)
                trainer = Trainer(
                    model, optimizer=partial(torch.optim.SGD, lr=0.1), loss=nn.MSELoss(), accumulate_grad_batches=2
                )
                trainer.fit((x, x[:, : SIZES[-1]]), batch_size=4, epochs=1, shuffle=False)
                trained.append([parameter.detach().clone() for parameter in model.parameters()])
                model.close()
            for early in trained[1:]:
                assert all(map(torch.equal, early, trained[0]))

    world(body)


@pytest.mark.ranks(2)
def test_what_passes_hold_is_freed_when_they_end(world: World) -> None:
    built = network()

    def body(comm: AbstractCommunicator) -> None:
        model = tiled(built, comm, layout=simple_layout([0], [1]), batch_size=9, bucket_bytes=1)
        made: list[weakref.ref[Departures]] = []
        model.module.register_forward_pre_hook(lambda *_: made.append(weakref.ref(model._sums._departing)))  # type: ignore[arg-type]
        gc.disable()
        try:
            torch.autograd.backward(model(model.local(batch())).square().mean())
            model(model.local(batch()))  # without a backward pass
            assert [each() for each in made] == [None, None]
        finally:
            gc.enable()

    world(body)


@pytest.mark.threads_only
@pytest.mark.ranks(2)
def test_on_a_device_all_leave_together(world: World) -> None:
    """Also where one rank alone is on one."""
    built = network()

    def body(comm: AbstractCommunicator) -> None:
        with PretendDevice():
            make = partial(
                tile, built, comm, batch_size=9, speeds="equal", layout=simple_layout([0], [1]), reduction="mean", quiet=True,
                device=DEVICE if comm.rank else "cpu",
            )  # fmt: skip
            with pytest.raises(InputError, match="bucket_bytes=1: rank 1 is on a device, where all gradients leave together"):
                make(bucket_bytes=1)
            assert make(bucket_bytes="auto").workload.bucket_bytes is None

    world(body)


def probed(*hosts: str, message_s: float = 1e-6) -> Cluster:
    make = partial(Processor, speed=1.0, message_s=message_s)
    return Cluster(processors=tuple(make(name=f"p{rank}", host=host) for rank, host in enumerate(hosts)))


class Changing(Placed):
    """Of an elastic run."""

    @property
    def changes(self) -> bool:
        return True


@pytest.mark.threads_only
@pytest.mark.ranks(2)
@pytest.mark.parametrize("cores", [3.0, 2.5])
def test_auto_is_early_only_where_it_is_known_to_pay(world: World, monkeypatch: pytest.MonkeyPatch, cores: float) -> None:
    """Of messages that were measured, on several hosts that each have a core beside the two threads that compute."""
    monkeypatch.setattr(bucket_choice, "cores_here", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def body(comm: AbstractCommunicator) -> None:
        def chosen(wanted: Any, cluster: Cluster, workload: Workload, placed: type[Placed] = Placed) -> int | None:
            return bucket_choice.choose_bucket_bytes(
                wanted,
                placed(comm, hosts=tuple(each.host for each in cluster.processors)),
                device=torch.device("cpu"),
                layout=simple_layout([0], [1]),
                cluster=cluster,
                workload=workload,
                cost=None,
            )

        measured = probed("h0", "h1")
        assert (chosen("auto", measured, deep()) is not None) == (cores == 3.0)
        assert chosen("auto", probed("h0", "h1", message_s=0.0), deep()) is None
        assert chosen("auto", probed("h0", "h1", message_s=1.0), deep()) is None
        assert chosen("auto", probed("h0", "h0"), deep()) is None
        assert chosen("auto", measured, net_workload("8-8-8-8-8", samples=8)) is None
        assert chosen(7, measured, deep()) == 7
        assert chosen(None, measured, deep()) is None
        assert chosen("auto", measured, deep(), Changing) is None
        with pytest.raises(InputError, match="bucket_bytes=7: the ranks of an elastic run may change"):
            chosen(7, measured, deep(), Changing)
        for wanted in (0, "much", 1.5):
            with pytest.raises(InputError, match="bucket_bytes must be a number of bytes"):
                chosen(wanted, measured, deep())

    world(body)


def deep(bucket_bytes: int | None = None) -> Workload:
    return replace(net_workload("-".join(["512"] * 21), samples=512), bucket_bytes=bucket_bytes)


def test_buckets_fill_from_the_last_block() -> None:
    assert departures(deep()) == (tuple(reversed(range(10))),)
    assert departures(deep(1)) == tuple((number,) for number in reversed(range(10)))
    assert departures(deep(3 * 512 * 1024 * 4)) == ((9, 8, 7), (6, 5, 4), (3, 2, 1), (0,))
    assert departures(net_workload("8-8-8", samples=8)) == ((0,),)
    with pytest.raises(PlanError, match="bucket_bytes of a workload must be at least 1"):
        deep(0)


def test_hiding_is_priced() -> None:
    """On a wire as fast as the processors all but the last bucket hides; messages that cost more than it gains forbid it."""
    layout = simple_layout([0], [1])
    cluster = Cluster(processors=tuple(Processor(name=f"p{rank}", speed=1.0, host=f"h{rank}") for rank in range(2)))
    late, early = (AlphaBetaCost().price(layout, cluster=cluster, workload=each) for each in (deep(), deep(1)))
    assert early.compute == late.compute
    assert early.vertical == late.vertical
    assert late.horizontal / 10 < early.horizontal < late.horizontal / 3
    assert time_bound_s(cluster, workload=deep(1), cost=AlphaBetaCost()) <= early.total
    assert AlphaBetaCost().at_least(layout, cluster=cluster, workload=deep(1)) <= early.total
    assert hiding_pays(layout, cluster=cluster, workload=deep(), bucket_bytes=1 << 20)
    assert not hiding_pays(simple_layout([0, 1]), cluster=cluster, workload=deep(), bucket_bytes=1 << 20)
    assert not hiding_pays(layout, cluster=cluster, workload=net_workload("512-512-512", samples=512), bucket_bytes=1 << 20)
    dear = replace(cluster, processors=tuple(replace(each, message_s=1.0) for each in cluster.processors))
    assert not hiding_pays(layout, cluster=dear, workload=deep(), bucket_bytes=1 << 20)
