"""Re-tiling to other pipeline stages: training goes on as on one machine, whatever moves."""

import contextlib
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stages_rig import CASES, AdamW, Case, assert_same, floats, made, numbers, plain_run, tiled
from torch import nn

import tatami
from hand_clock import HandClock
from tatami.comm.base import AbstractCommunicator
from tatami.errors import ModelError, PlanError
from tatami.partition.pieces import record_network
from tatami.partition.tracing.sample import Sample
from tatami.records import Records
from tatami.retiling import Retiler
from tatami.stages.stand_in import StandIn
from tatami.testing.worlds import World
from tatami.tiling import Layout, Replica, StagedLayout
from tatami.train import TiledModel, Trainer, move, whole_state_dict
from tiled_rig import EXAMPLES, layouts, property_test, shares, staged

pytestmark = pytest.mark.ranks(2)


@functools.cache
def pieces_of(name: str) -> int:
    case = CASES[name]()
    return len(record_network(case.make(), Sample.of(case.x)).pieces)


@st.composite
def placements(draw: st.DrawFn, size: int, *, pieces: int) -> Layout | StagedLayout:
    """Any ranks in any stages of any replicas, some of which share units, or are left out; or no stages."""
    stages = draw(st.integers(1, min(size, pieces)))
    if stages == 1:
        return draw(layouts(size))
    ranks = draw(st.permutations(range(size)))
    replicas = draw(st.integers(1, size // stages))
    members = {(stage, replica): [ranks.pop()] for stage in range(stages) for replica in range(replicas)}
    for rank in ranks:
        place = draw(st.sampled_from([None, *members]))
        if place is not None:
            members[place].append(rank)
    widths = shares(draw, replicas) if replicas > 1 else (1.0,)
    micro_batches = [draw(st.integers(1, 4)) for _ in range(replicas)]

    def one(stage: int, replica: int) -> Replica:
        names = tuple(f"p{rank}" for rank in members[stage, replica])
        heights = shares(draw, len(names)) if len(names) > 1 else (1.0,)
        return Replica(width=widths[replica], processors=names, heights=heights, micro_batches=micro_batches[replica])

    laid = [Layout(replicas=tuple(one(stage, replica) for replica in range(replicas))) for stage in range(stages)]
    cuts = draw(st.lists(st.integers(1, pieces - 1), min_size=stages - 1, max_size=stages - 1, unique=True))
    return StagedLayout(stages=tuple(laid), cuts=tuple(sorted(cuts)))


def step(model: TiledModel, case: Case, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    for x, y in model.micro_batches(case.x, case.y):
        torch.autograd.backward(case.loss(model(**x), y))
    torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    optimizer.step()


@pytest.mark.ranks(2, 3, 4)
@settings(property_test, max_examples=EXAMPLES // 2)
@given(name=st.sampled_from(sorted(CASES)), data=st.data())
def test_training_goes_on_across_other_stages(world: World, name: str, data: st.DataObject) -> None:
    """Wherever the ranks lie. Where ranks would share units of a stage that has none to share, they stay where they are."""
    case = CASES[name]()
    journey = [data.draw(placements(world.size, pieces=pieces_of(name)), label="layout") for _ in range(3)]

    def body(comm: AbstractCommunicator) -> dict[str, torch.Tensor]:
        model = tiled(case, comm, staged(comm.size, stages=2, cuts=(1,)))
        parameters = list(model.parameters())
        optimizer = AdamW(parameters)
        for layout in journey:
            step(model, case, parameters, optimizer)
            with contextlib.suppress(PlanError):
                move(model, layout, optimizer=optimizer)
        step(model, case, parameters, optimizer)
        assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
        here = {id(each) for each in parameters if not isinstance(each, StandIn)}
        assert {id(each) for each in optimizer.state} <= here, "no state of what other stages have"
        weights = whole_state_dict(model)
        model.close()
        return weights

    if found := world(body)[0]:  # on rank 0
        assert_same(found, plain_run(case, steps=4))


class Noisy(nn.Module):
    """Dropout, batch normalization, a buffer that each pass changes, and a residual connection."""

    counted: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Dropout(0.3), nn.Linear(9, 12))
        self.middle = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 12))
        self.last = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        return self.last(hidden + self.middle(hidden))


noisy = made(Noisy)
SAMPLES = 12


def noisy_data() -> tuple[torch.Tensor, torch.Tensor]:
    return floats(SAMPLES, 6), numbers(SAMPLES, below=3)


def noisy_plain(steps: int) -> dict[str, torch.Tensor]:
    """After so many steps of AdamW on one machine, which draws from torch's generator as it is now."""
    network, (x, y) = noisy(), noisy_data()
    optimizer = AdamW(network.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(network(x), y))
        optimizer.step()
    return network.state_dict()


class Machine(HandClock):
    """A rank's clock and pace: an iteration takes what its stage would compute on a machine that is `slower` by so much."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.slower = 1e6  # so that an iteration takes seconds, and moving pays
        self.model: TiledModel | None = None
        self._counted: object = self

    def begin(self) -> None:
        pass

    def end(self) -> None:
        if self.model is None or self._counted is self.model.phases.last:
            return
        self._counted, stage = self.model.phases.last, self.model.stage
        assert stage is not None
        assert stage.plan is not None
        self.sleep(self.slower * sum(each.compute_s for each in stage.plan.ranks if each.processor == self.model.name))


@pytest.mark.ranks(2, 3)
def test_a_trainer_moves_to_other_stages_and_trains_as_one_machine(world: World) -> None:
    """Dropout draws on, batch normalization keeps its statistics, and gradients are seen by the hooks of users."""
    x, y = noisy_data()
    steps = 40

    def body(comm: AbstractCommunicator) -> tuple[list[str], bool, int, dict[str, torch.Tensor]]:
        machine, seen = Machine(), []
        network = noisy()
        weight: Any = network.get_parameter("middle.1.weight")
        weight.register_post_accumulate_grad_hook(lambda _: seen.append(1))
        torch.manual_seed(3)
        model = tatami.tile(
            network,
            comm,
            batch_size=SAMPLES,
            sample=x[:4],
            layout=staged(comm.size, stages=2, cuts=(1,)),
            speeds="equal",
            reduction="mean",
            quiet=True,
            clock=machine,
            pace=machine,
        )
        machine.model = model
        before = model.stage
        trainer = Trainer(model, optimizer=AdamW, loss=nn.CrossEntropyLoss(), retile=Retiler(), records=Records())
        trainer.fit((x, y), batch_size=SAMPLES, iterations=steps // 2, shuffle=False)
        if comm.rank == 0:
            machine.slower *= 20
        history = trainer.fit((x, y), batch_size=SAMPLES, iterations=steps // 2, shuffle=False)
        kinds = [check.decision.kind.value for check in history.checks]
        has_moved = model.stage is not before
        weights = whole_state_dict(model)
        model.close()
        return kinds, has_moved, len(seen), weights

    results = world(body)
    assert all(kinds == results[0][0] for kinds, *_ in results)
    assert all(has_moved for _, has_moved, *_ in results)
    assert "other stages" in results[0][0]
    assert sum(seen for *_, seen, _ in results) >= steps, "in each step, whichever rank has the weight"
    torch.manual_seed(3)
    for name, tensor in noisy_plain(steps).items():
        if results[0][3]:
            torch.testing.assert_close(results[0][3][name], tensor, rtol=1e-9, atol=1e-11, msg=f"{name} differs")


def test_what_cannot_move_is_refused_and_nothing_changes(comm: AbstractCommunicator) -> None:
    case = CASES["gpt"]()
    layout, other = staged(2, stages=2, cuts=(1,)), staged(2, stages=2, cuts=(3,))
    model = tiled(case, comm, layout)
    parameters = list(model.parameters())
    optimizer = AdamW(parameters)
    step(model, case, parameters, optimizer)
    weights = whole_state_dict(model)
    stranger = staged(3, stages=3, cuts=(1, 2))
    with pytest.raises(PlanError, match="p2"):
        move(model, stranger, optimizer=optimizer)
    with pytest.raises(ModelError, match="cut in front of piece 99"):
        move(model, staged(2, stages=2, cuts=(99,)), optimizer=optimizer)
    with pytest.raises(ModelError, match="companions"):
        move(model, other, optimizer=optimizer, companions={parameters[0]: parameters[0].detach()})
    head = model.module.get_submodule("head")
    forward, plain = vars(head).get("forward"), head.forward
    vars(head)["forward"] = lambda *given: plain(*given)
    with pytest.raises(ModelError, match=r"the forward of head was replaced"):
        move(model, other, optimizer=optimizer)
    if forward is None:
        del vars(head)["forward"]
    else:
        vars(head)["forward"] = forward
    out = model(**model.local(case.x, case.y)[0])
    for name, tensor in whole_state_dict(model).items():
        assert torch.equal(tensor, weights[name])
    torch.autograd.backward(case.loss(out, model.local(case.x, case.y)[1]))
    optimizer.step()
    held = [weakref.ref(each) for each in parameters]
    move(model, other, optimizer=optimizer)
    assert all(each() is parameter for each, parameter in zip(held, parameters, strict=True))
    step(model, case, parameters, optimizer)
    model.close()


def test_a_model_that_knows_no_pieces_gets_no_stages(comm: AbstractCommunicator) -> None:
    model = tatami.tile(noisy(), comm, batch_size=SAMPLES, speeds="equal", reduction="mean", quiet=True)
    with pytest.raises(ModelError, match="a sample"):
        move(model, staged(2, stages=2, cuts=(1,)), optimizer=None)
    model.close()
