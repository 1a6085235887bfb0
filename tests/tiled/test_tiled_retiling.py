"""DRPM at work on a clock of the test's own: it settles in time, leaves a balanced run alone, and training stays exact."""

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import pytest
import torch
from equal_runs import plain_fit
from torch import nn

from drawing import mlp
from hand_clock import HandClock
from tatami.comm import AbstractCommunicator, WrappedCommunicator
from tatami.errors import CommError, PlanError
from tatami.records import Records
from tatami.retiling import Decision, Retiler
from tatami.retiling.watching import Found
from tatami.runtime.stopwatch import HostStopwatch
from tatami.testing.worlds import World
from tatami.tiling import Layout
from tatami.train import Check, IterationPhase, Retiling, TiledModel, Trainer, move, tile, whole_state_dict
from tatami.train.own_times import _Probe
from tiled_rig import assert_close, optimizers, simple_layout, tiled

pytestmark = pytest.mark.ranks(2, 3, 4)

SAMPLES, UNITS = 256, 128
SPEEDS = [1.0, 1.0, 0.5, 0.25]
ADAM = optimizers(torch.float64)["adam"]


class Machine(HandClock):
    """A rank's clock and pace: backward takes the area of its tile over its speed, and nothing else takes time."""

    def __init__(self, speed: float) -> None:
        super().__init__(0.0)
        self.speed = speed
        self.model: TiledModel | None = None

    def begin(self) -> None:
        pass

    def end(self) -> None:
        if self.model is not None and self.model.phases.current is IterationPhase.BACKWARD:
            self.sleep(self.model.local_work / self.speed / 1e6)


network = partial(mlp, 3, UNITS, 2)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64),
        torch.rand(SAMPLES, 2, generator=generator, dtype=torch.float64),
    )


def trained_plainly(steps: int) -> dict[str, torch.Tensor]:
    """The weights after so many steps of Adam on one machine."""
    return plain_fit(network(), [data()] * steps, loss=mse, optimizer=ADAM)[1]


def mse(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def laid(built: nn.Module, comm: AbstractCommunicator, machine: Machine, *, planner: str = "srpm") -> TiledModel:
    options: Any = {"reduction": "mean", "quiet": True, "clock": machine, "pace": machine}
    model = tile(built, comm, batch_size=SAMPLES, speeds="equal", planner=planner, **options)
    machine.model = model
    return model


@pytest.mark.ranks(4)
@pytest.mark.parametrize("planner", ["srpm", "even", "weighted"])
def test_it_settles_from_no_knowledge_and_again_after_a_rank_slows_down(world: World, planner: str) -> None:
    built, expected = network(), trained_plainly(16 * 4)
    x, y = data()

    def body(comm: AbstractCommunicator) -> list[Check]:
        machine = Machine(SPEEDS[comm.rank])
        model = laid(built, comm, machine, planner=planner)
        trainer = Trainer(model, optimizer=ADAM, loss=nn.MSELoss(), retile=Retiler(every=4, window=3, planner="srpm"))
        identities = [id(parameter) for parameter in model.parameters()]
        checks = trainer.fit((x, y), batch_size=SAMPLES, iterations=8 * 4).checks
        if comm.rank == 1:
            machine.speed /= 3
        checks += trainer.fit((x, y), batch_size=SAMPLES, iterations=8 * 4).checks
        assert identities == [id(parameter) for parameter in model.parameters()]
        assert_close(comm.bcast_object(whole_state_dict(model)), expected, what="parameters")
        return checks

    seen = world(body)
    for checks in seen:
        assert [check.imbalance for check in checks] == [check.imbalance for check in seen[0]]
        assert len(checks) == 16
        # Even tiles over these speeds: the slowest takes four times as long as the fastest.
        assert checks[0].imbalance == pytest.approx(4.0, rel=0.05)
        assert checks[0].decision.remaps
        for start in (0, 8):
            assert all(check.imbalance < 1.25 for check in checks[start + 2 : start + 8])
            assert not any(check.decision.remaps for check in checks[start + 3 : start + 8])
        assert checks[8].imbalance > 2
        moves = [check.moved for check in checks if check.moved is not None]
        assert len(moves) >= 2
        assert any(moved.num_units > 0 for moved in moves)


@pytest.mark.ranks(2, 3)
def test_a_balanced_run_is_left_alone(comm: AbstractCommunicator) -> None:
    built = network()
    model = laid(built, comm, Machine(1.0))
    before = model.layout
    optimizer = ADAM(model.parameters())
    retiling = Retiling(model, optimizer, retiler=Retiler(every=5, window=3))
    x, y = data()
    for iteration in range(1, 21):
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(model(model.local(x)), model.local(y)))
        optimizer.step()
        check = retiling.step()
        assert (check is not None) == (iteration % 5 == 0)
        if check is not None:
            assert check.moved is None
            assert check.imbalance < 1.1
    assert model.layout == before
    assert len(retiling.checks) == 4


def test_what_moves_is_weights_and_optimizer_state_and_no_more(world: World) -> None:
    """From one replica to another of the same ranks: rows of 3 inputs + 1 bias + 2 outputs, in three tensors each for Adam."""
    built = network()

    def body(comm: AbstractCommunicator) -> tuple[int, int]:
        ranks = list(range(comm.size))
        first = simple_layout(ranks)
        second = simple_layout(list(reversed(ranks)))
        model = tiled(built, comm, layout=first, batch_size=SAMPLES)
        optimizer = ADAM(model.parameters())
        torch.autograd.backward(model(model.local(data()[0])).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        moved = move(model, second, optimizer=optimizer)
        assert move(model, second, optimizer=optimizer).sent_bytes == 0
        return moved.num_units, moved.sent_bytes

    results = world(body)
    tiles = (simple_layout(list(range(world.size))), simple_layout(list(reversed(range(world.size)))))
    old, new = (layout.cut(samples=SAMPLES, units=UNITS).by_processor for layout in tiles)
    kept = sum((old[name].units & new[name].units).size for name in old)
    assert {units for units, _ in results} == {UNITS - kept}
    assert sum(sent for _, sent in results) == (UNITS - kept) * (3 + 1 + 2) * 3 * 8


def test_one_rank_plans_for_all_and_a_plan_that_fails_fails_everywhere(world: World) -> None:
    built = network()
    x, y = data()

    def body(comm: AbstractCommunicator) -> tuple[list[int], Layout]:
        machine = Machine(4.0 if comm.rank == comm.size - 1 else 1.0)
        model = laid(built, comm, machine)
        optimizer = ADAM(model.parameters())
        retiling = Retiling(model, optimizer, retiler=Retiler())
        watcher = retiling.watcher
        assert watcher is not None
        told, leads = watcher.planned, []

        def planned(leader: str, compute: Callable[[], Found]) -> tuple[Found, float]:
            def counted() -> Found:
                leads.append(comm.rank)
                return compute()

            return told(leader, counted)

        watcher.planned = planned
        for _ in range(30):
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.mse_loss(model(model.local(x)), model.local(y)))
            optimizer.step()
            retiling.step()

        def fails() -> int:
            raise PlanError("no layout")

        with pytest.raises(PlanError, match="no layout"):
            told(model.names[0], fails)
        return leads, model.layout

    results = world(body)
    assert [bool(leads) for leads, _ in results] == [rank == world.size - 1 for rank in range(world.size)]
    assert len({layout for _, layout in results}) == 1


@pytest.mark.ranks(2, 3)
def test_what_a_loop_waits_for_its_own_sum_is_no_compute_time(comm: AbstractCommunicator) -> None:
    """Rank 0 waits for a second in each: its compute time per work is still the backward pass, and nothing else."""
    built = network()
    x, y = data()
    machine = Machine(1.0)
    model = laid(built, comm, machine, planner="even")
    optimizer = ADAM(model.parameters())
    retiling = Retiling(model, optimizer, retiler=Retiler())
    own = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(model.local(x)), model.local(y))
        torch.autograd.backward(loss)
        sums = torch.tensor([loss.item(), *retiling.local_report()], dtype=torch.float64)
        own.append(float(sums[1 + comm.rank]))
        request = comm.iallreduce(sums)
        if comm.rank == 0:
            machine.sleep(1.0)
        request.wait()
        retiling.apply_totals(sums.tolist()[1:])
        assert model.phases.current is IterationPhase.UPDATE
        optimizer.step()
        retiling.step()
    own, per_work_s = own, 1.0 / 1e6
    assert own[1:] == pytest.approx([per_work_s] * 3, rel=1e-6)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_slow_rank_is_noticed_and_relieved_within_few_iterations_and_training_stays_exact(
    world: World, by_hand: bool
) -> None:
    built, expected = network(), trained_plainly(60)
    x, y = data()

    def body(comm: AbstractCommunicator) -> tuple[list[Check], list[Decision]]:
        machine = Machine(1.0)
        model = laid(built, comm, machine)
        optimizer = ADAM(model.parameters())
        records = Records()
        records.kept = []
        trainer = Trainer(
            model,
            optimizer=optimizer,
            loss=nn.MSELoss(),
            retile=None if by_hand else Retiler(),
            records=records,
            record_every=1,
        )
        retiling = Retiling(model, optimizer, retiler=Retiler()) if by_hand else None

        def go(iterations: int) -> list[Check]:
            if retiling is None:
                return trainer.fit((x, y), batch_size=SAMPLES, iterations=iterations).checks
            before = len(retiling.checks)
            for _ in range(iterations):
                optimizer.zero_grad()
                torch.autograd.backward(nn.functional.mse_loss(model(model.local(x)), model.local(y)))
                optimizer.step()
                retiling.step()
            return retiling.checks[before:]

        assert go(30) == []
        if comm.rank == 1:
            machine.speed /= 3
        checks = go(30)
        assert_close(comm.bcast_object(whole_state_dict(model)), expected, what="parameters")
        if comm.rank == 0 and not by_hand:
            watched = [record for record in records.kept if record["event"] == "watch"]
            first = next(alarm for record in watched for alarm in record["alarms"])
            assert (first["what"], first["began"]) == ("p1", 31)
            assert first["slower"] == pytest.approx(3.0, rel=0.1)
            assert all(price_s > 0 for record in watched for price_s in record["price_s"].values())
            assert set(watched[-1]["speeds"]) == set(model.names)
        return checks, [check.decision for check in checks]

    results = world(body)
    checks, decisions = results[0]
    # Equal floating-point numbers, in layouts, speeds and ratios: to the bit.
    assert all(other == decisions for _, other in results)
    moved = [check for check in checks if check.decision.remaps]
    assert 33 <= moved[0].decision.iteration <= 36
    assert moved[0].imbalance > 2
    assert moved[-1].decision.predicted > 0.7
    assert len(moved) <= 3


@pytest.mark.ranks(2)
def test_watching_sends_nothing_of_its_own_in_the_trainer(comm: AbstractCommunicator) -> None:
    """As many operations as without a re-tiler: the times go with the sum of the loss."""
    built = network()
    counts = []
    for retile in (None, Retiler()):
        counted = Counted(comm)
        model = tiled(built, counted, layout=simple_layout([0, 1]), batch_size=SAMPLES)
        trainer = Trainer(model, optimizer=ADAM, loss=nn.MSELoss(), retile=retile)
        own = model.comm
        assert isinstance(own, Counted)
        own.count = 0
        trainer.fit(data(), batch_size=SAMPLES, iterations=5)
        counts.append(own.count)
    without, watched = counts
    assert without == watched > 0


class Counted(WrappedCommunicator):
    """Counts operations."""

    count = 0

    def _before(self, operation: str, *, peer: int | None = None, tensor: torch.Tensor | None = None) -> None:  # noqa: ARG002
        self.count += 1

    def _wrap(self, part: AbstractCommunicator) -> Self:
        return type(self)(part)


class Breakable(WrappedCommunicator):
    """Every message fails while `broken`; collectives go on."""

    broken = False

    def _before(self, operation: str, *, peer: int | None = None, tensor: torch.Tensor | None = None) -> None:  # noqa: ARG002
        if self.broken and operation in ("isend", "irecv"):
            raise CommError(f"{operation} with rank {peer}: the link is cut")

    def _wrap(self, part: AbstractCommunicator) -> Self:
        return type(self)(part)


def test_a_retiling_that_fails_leaves_model_and_optimizer_as_they_were(comm: AbstractCommunicator) -> None:
    """The rows of a moved tile do not come: the model still computes, on the old tiling, what the plain one does."""
    built, expected = network(), trained_plainly(3)
    x, y = data()
    ranks = list(range(comm.size))
    model = tiled(built, Breakable(comm), layout=simple_layout(ranks), batch_size=SAMPLES)
    link = model.comm
    assert isinstance(link, Breakable)
    optimizer = ADAM(model.parameters())
    for step in range(3):
        here_x, here_y = model.local(x, y)
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(model(here_x), here_y))
        if step == 1:
            before = model.layout, model.tilings, [parameter.clone() for parameter in model.parameters()]
            link.broken = True
            with pytest.raises(CommError, match="the link is cut"):
                move(model, simple_layout([*ranks[1:], 0]), optimizer=optimizer)
            link.broken = False
            assert (model.layout, model.tilings) == before[:2]
            assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before[2], strict=True))
        optimizer.step()
        if step == 1:
            assert move(model, simple_layout([*ranks[1:], 0]), optimizer=optimizer).num_units > 0
    assert_close(comm.bcast_object(whole_state_dict(model)), expected, what="parameters")


def test_a_rank_that_was_left_out_is_as_slow_as_it_was_known_to_be_until_its_probe_says_otherwise() -> None:
    clock = HandClock(0.0, step_s=2.0)
    probe = _Probe(HostStopwatch(clock), torch.device("cpu"))
    assert probe.per_work_s(float("nan")) == 0.0
    assert not probe.has_looked
    assert probe.per_work_s(0.125) == 0.125
    clock.step_s = 0.5
    # What is known by then is what the probe itself said: only the first look counts.
    assert probe.per_work_s(7.0) == 0.125 / 4
    clock.step_s = 4.0
    assert probe.per_work_s(7.0) == 0.25


class Looked(Machine):
    """A machine on which looking at the clock takes time as well, by its speed: so a probe sees how fast it is."""

    def now_s(self) -> float:
        self.sleep(1e-9 / self.speed)
        return super().now_s()


@pytest.mark.ranks(4)
def test_a_rank_that_all_but_stops_is_left_out_and_taken_in_again_when_it_is_itself(world: World) -> None:
    built, expected = network(), trained_plainly(170)
    x, y = data()

    def body(comm: AbstractCommunicator) -> tuple[list[Decision], list[int]]:
        machine = Looked(1.0)
        model = laid(built, comm, machine)
        trainer = Trainer(model, optimizer=ADAM, loss=nn.MSELoss(), retile=Retiler())
        decisions, tiles = [], []
        for iterations, factor in ((30, 1 / 1000), (40, 1000), (100, 1.0)):
            checks = trainer.fit((x, y), batch_size=SAMPLES, iterations=iterations).checks
            decisions += [check.decision for check in checks if check.decision.remaps]
            tiles.append(len(model.tiling.tiles))
            if comm.rank == 1:
                machine.speed *= factor
        assert_close(comm.bcast_object(whole_state_dict(model)), expected, what="parameters")
        return decisions, tiles

    results = world(body)
    decisions, tiles = results[0]
    assert all(each == results[0] for each in results)
    assert tiles == [4, 3, 4]
    assert len(decisions) <= 6
