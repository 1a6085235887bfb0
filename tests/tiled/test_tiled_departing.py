"""Gradients that leave while earlier blocks compute. That they are exact, and as described, is in the tests of both."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from tatami.cluster import Cluster, Processor
from tatami.comm.base import AbstractCommunicator
from tatami.errors import ModelError, PlanError
from tatami.testing.worlds import World
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
