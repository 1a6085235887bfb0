"""Re-tiling to other pipeline stages: training goes on as on one machine, whatever moves."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from stages_rig import CASES, Case, floats, made, numbers
from torch import nn

import tatami
from hand_clock import HandClock
from tatami.comm.base import AbstractCommunicator
from tatami.errors import ModelError, PlanError
from tatami.records import Records
from tatami.retiling import Retiler
from tatami.stages.stand_in import StandIn
from tatami.testing.worlds import World
from tatami.tiled import TiledModel, Trainer, move, whole_state_dict
from tatami.tiling import Column, Layout, StagedLayout
from tiled_rig import staged

AdamW = partial(torch.optim.AdamW, lr=0.01, eps=1e-4)


def flat(*widths: float, together: int = 1) -> Layout:
    """Replicas of so many ranks each, with these shares of the samples."""
    columns = []
    for number, width in enumerate(widths):
        names = tuple(f"p{number * together + rank}" for rank in range(together))
        columns.append(Column(width=width, processors=names, heights=tuple(1 / together for _ in names)))
    return Layout(columns=tuple(columns))


def sharing(*sizes: int, cut: int, micro_batches: int = 1) -> StagedLayout:
    """One replica of two stages of so many ranks."""
    stages, taken = [], 0
    for size in sizes:
        names = tuple(f"p{rank}" for rank in range(taken, taken + size))
        heights = tuple((2 + place) / sum(range(2, 2 + size)) for place in range(size))
        stages.append(Layout(columns=(Column(width=1.0, processors=names, heights=heights, micro_batches=micro_batches),)))
        taken += size
    return StagedLayout(stages=tuple(stages), cuts=(cut,))


SHARED = {"gpt": 2, "gpt-tied": 3, "perceptron": 1}
"""In front of which piece a network is cut so that ranks can share the units of both stages."""


def journey(size: int, *, cut: int | None) -> list[Layout | StagedLayout]:
    """Layouts one after another: other cuts, numbers of stages, replicas, micro-batches; and none of these."""
    if size == 2:
        return [
            staged(2, stages=2, cuts=(1,)),
            staged(2, stages=2, cuts=(3,), micro_batches=2),
            flat(0.5, 0.5),
            staged(2, stages=2, cuts=(2,), micro_batches=3),
            flat(1.0, together=2),
        ]
    if size == 3:
        wide = [] if cut is None else [sharing(2, 1, cut=cut), sharing(1, 2, cut=cut, micro_batches=2)]
        return [
            staged(3, stages=3, cuts=(1, 3)),
            staged(3, stages=3, cuts=(1, 2), micro_batches=2),
            *wide,
            flat(0.5, 0.25, 0.25),
            staged(2, stages=2, cuts=(2,)),  # two ranks of three
            flat(0.5, 0.5),
            staged(3, stages=3, cuts=(1, 3)),
            *wide[::-1],
        ]
    return [
        staged(4, stages=2, cuts=(2,)),
        staged(4, stages=4, cuts=(1, 2, 3), micro_batches=2),
        *([] if cut is None else [sharing(2, 2, cut=cut)]),
        flat(0.75, 0.25, together=2),
        staged(4, stages=2, cuts=(1,), micro_batches=2),
    ]


def tiled(case: Case, comm: AbstractCommunicator, layout: Layout | StagedLayout) -> TiledModel:
    return tatami.tile(
        case.make(),
        comm,
        batch_size=len(case.y),
        sample=case.x,
        layout=layout,
        speeds="equal",
        reduction="mean",
        quiet=True,
    )


def step(model: TiledModel, case: Case, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    for x, y in model.micro_batches(case.x, case.y):
        torch.autograd.backward(case.loss(model(**x), y))
    torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    optimizer.step()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["gpt", "gpt-tied", "u-net", "encoder-decoder", "perceptron", "called-twice"])
def test_training_goes_on_across_other_stages(world: World, name: str) -> None:
    case = CASES[name]()

    def body(comm: AbstractCommunicator) -> dict[str, torch.Tensor]:
        layouts = journey(comm.size, cut=SHARED.get(name))
        model = tiled(case, comm, layouts[0])
        parameters = list(model.parameters())
        optimizer = AdamW(parameters)
        for layout in (*layouts[1:], None):
            step(model, case, parameters, optimizer)
            if layout is not None:
                move(model, layout, optimizer=optimizer)
        assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
        here = {id(each) for each in parameters if not isinstance(each, StandIn)}
        assert {id(each) for each in optimizer.state} <= here, "no state of what other stages have"
        weights = whole_state_dict(model)
        model.close()
        return weights

    found = world(body)[0]
    network = case.make()
    optimizer = AdamW(network.parameters())
    for _ in journey(world.size, cut=SHARED.get(name)):
        optimizer.zero_grad()
        torch.autograd.backward(case.loss(network(**case.x), case.y))
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.step()
    expected = network.state_dict()
    if found:  # on rank 0
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-10, atol=1e-12, msg=f"{key} differs")


class Noisy(nn.Module):
    """Dropout, batch normalization, a buffer that each pass changes, and a residual connection."""

    counted: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Dropout(0.3), nn.Linear(9, 12))
        self.middle = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 12))
        self.last = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        result: torch.Tensor = self.last(hidden + self.middle(hidden))
        return result


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


@pytest.mark.ranks(2)
def test_what_cannot_move_is_refused_and_nothing_changes(world: World) -> None:
    case = CASES["gpt"]()
    layout, other = staged(2, stages=2, cuts=(1,)), staged(2, stages=2, cuts=(3,))

    def body(comm: AbstractCommunicator) -> None:
        model = tiled(case, comm, layout)
        parameters = list(model.parameters())
        optimizer = AdamW(parameters)
        step(model, case, parameters, optimizer)
        weights = whole_state_dict(model)
        stranger = staged(3, stages=3, cuts=(1, 2))
        with pytest.raises(PlanError, match="p2"):
            move(model, stranger, optimizer=optimizer)
        with pytest.raises(ModelError, match="more than the 7"):
            move(model, staged(2, stages=2, cuts=(99,)), optimizer=optimizer)
        with pytest.raises(ModelError, match="companions"):
            move(model, other, optimizer=optimizer, companions={parameters[0]: parameters[0].detach()})
        held = [weakref.ref(each) for each in parameters]
        with pytest.raises(ModelError, match="weakly"):
            move(model, other, optimizer=optimizer)
        del held
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
        move(model, other, optimizer=optimizer)
        step(model, case, parameters, optimizer)
        model.close()

    world(body)


@pytest.mark.ranks(2)
def test_a_model_that_knows_no_pieces_gets_no_stages(world: World) -> None:
    def body(comm: AbstractCommunicator) -> None:
        model = tatami.tile(noisy(), comm, batch_size=SAMPLES, speeds="equal", reduction="mean", quiet=True)
        with pytest.raises(ModelError, match="a sample"):
            move(model, staged(2, stages=2, cuts=(1,)), optimizer=None)
        model.close()

    world(body)
