"""Phases, measured speeds and rows: on a clock of the test's own, and on whole numbers."""

from typing import Self

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_tiled_retiling import ADAM, SAMPLES, Machine, data, network

from drawing import mlp
from hand_clock import HandClock
from tatami.cluster import Cluster, Processor, speed_at
from tatami.comm import AbstractCommunicator, AbstractRequest, WrappedCommunicator
from tatami.retiling import Retiler
from tatami.runtime.rows import Rows, UnitRuns, blocks, pack
from tatami.testing.worlds import World
from tatami.tiling import Layout, Replica, Span
from tatami.train import IterationPhase, Phases, PhaseTimes, Retiling, measure_speed, measure_speeds, tile
from tatami.workload import Workload
from tiled_rig import some_layouts


class Paced:
    """Every stretch of compute takes as many seconds as `stretch_s` says."""

    def __init__(self, clock: HandClock, stretch_s: float) -> None:
        self.clock = clock
        self.stretch_s = stretch_s
        self.running = False

    def begin(self) -> None:
        assert not self.running
        self.running = True

    def end(self) -> None:
        assert self.running
        self.running = False
        self.clock.sleep(self.stretch_s)


def test_phases_add_up_and_start_anew() -> None:
    clock = HandClock()
    phases = Phases(clock=clock)
    clock.sleep(50)
    for phase, seconds in (
        (IterationPhase.FORWARD, 1),
        (IterationPhase.TENSOR_PARALLEL, 2),
        (IterationPhase.FORWARD, 4),
        (IterationPhase.BACKWARD, 8),
        (IterationPhase.GRADIENTS, 16),
        (IterationPhase.UPDATE, 32),
        (IterationPhase.HANDOVER, 64),
        (IterationPhase.BUBBLE, 128),
    ):
        phases.enter(phase)
        clock.sleep(seconds)
    times = phases.finish_iteration()
    stages = {"handover_s": 64, "bubble_s": 128}
    assert times == PhaseTimes(forward_s=5, tensor_parallel_s=2, backward_s=8, gradients_s=16, update_s=32, **stages)
    assert (times.t1_s, times.t2_s, times.compute_s, times.total_s) == (15, 8, 45, 255)
    phases.trace()
    clock.sleep(7)
    phases.enter(IterationPhase.FORWARD)
    for micro_batch in (0, 0, 1):
        phases.work_on(micro_batch)
        clock.sleep(1)
    assert phases.finish_iteration().forward_s == 3
    assert [(span.phase, span.micro_batch, span.began_s, span.ended_s) for span in phases.spans] == [
        (IterationPhase.FORWARD, 0, 7, 9),
        (IterationPhase.FORWARD, 1, 9, 10),
    ]
    clock.sleep(7)
    assert phases.finish_iteration().total_s == 0


def test_a_phase_inside_of_another_resumes_it_and_outside_counts_nothing() -> None:
    clock = HandClock()
    phases = Phases(clock=clock)
    with phases.during(IterationPhase.TENSOR_PARALLEL):  # an evaluation between two iterations
        clock.sleep(3)
    phases.enter(IterationPhase.BACKWARD)
    clock.sleep(1)
    with phases.during(IterationPhase.TENSOR_PARALLEL):
        clock.sleep(2)
    clock.sleep(4)
    times = phases.finish_iteration()
    assert (times.backward_s, times.tensor_parallel_s) == (5, 2)


def test_what_follows_an_iteration_that_ended_inside_of_a_phase_counts_for_nothing() -> None:
    """As where the last sum over the ranks of an elastic run makes the update."""
    clock = HandClock()
    phases = Phases(clock=clock)
    phases.enter(IterationPhase.UPDATE)
    with phases.during(IterationPhase.GRADIENTS):
        clock.sleep(1)
        phases.finish_iteration()
    clock.sleep(50)  # callbacks, a validation
    phases.enter(IterationPhase.FORWARD)
    clock.sleep(2)
    times = phases.finish_iteration()
    assert (times.forward_s, times.total_s) == (2, 2)


def test_pace_is_told_of_every_stretch_of_compute_and_of_nothing_else() -> None:
    clock = HandClock()
    phases = Phases(clock=clock, pace=Paced(clock, 10))
    for phase in (
        IterationPhase.FORWARD,
        IterationPhase.TENSOR_PARALLEL,
        IterationPhase.FORWARD,
        IterationPhase.BACKWARD,
        IterationPhase.GRADIENTS,
        IterationPhase.UPDATE,
    ):
        phases.enter(phase)
        clock.sleep(1)
    times = phases.finish_iteration()
    assert times == PhaseTimes(forward_s=22, tensor_parallel_s=1, backward_s=11, gradients_s=1, update_s=11)


@pytest.mark.ranks(1, 2, 3)
def test_a_step_passes_through_the_phases(comm: AbstractCommunicator) -> None:
    built = mlp(4, 8, 4, 8, 2, dtype=torch.float32)
    # Forward: three stretches where two tensor-parallel sums cut it; backward: two. Clipping cuts the update in two.
    replica = PhaseTimes(forward_s=3, tensor_parallel_s=0, backward_s=2, gradients_s=0, update_s=2)
    row = PhaseTimes(forward_s=1, tensor_parallel_s=0, backward_s=1, gradients_s=0, update_s=2)
    alone = PhaseTimes(forward_s=1, tensor_parallel_s=0, backward_s=1, gradients_s=0, update_s=1)  # clipping sends nothing
    for layout, expected in zip(some_layouts(comm.size)[:2], (replica, row) if comm.size > 1 else (alone,), strict=True):
        clock = HandClock()
        pace = Paced(clock, 1.0)
        model = tile(built, comm, batch_size=6, speeds="equal", layout=layout, reduction="mean", clock=clock, pace=pace)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            torch.autograd.backward(model(model.local(torch.ones(6, 4))).square().mean())
            model.clip_grad_norm_(1.0)
            optimizer.step()
            times = model.phases.finish_iteration()
            with torch.no_grad():
                model(model.local(torch.ones(6, 4)))
        assert times == expected


def test_speed_is_flop_over_time_and_the_first_repeat_is_not_counted() -> None:
    clock = HandClock()
    workload = Workload.mlp(4, 8, 2, samples=50)

    class Uneven(Paced):
        """1 s at first, as if it warmed up, then 2, 4, 2, 2, 2."""

        rounds = iter((1.0, 2.0, 4.0, 2.0, 2.0, 2.0))

        def end(self) -> None:
            self.stretch_s = next(self.rounds)
            super().end()

    speed = measure_speed(workload, clock=clock, pace=Uneven(clock, 0.0))
    assert speed.flop_per_s == pytest.approx(workload.flop_per_area / 2)
    assert speed.spread == pytest.approx((1 / 2 - 1 / 4) / (1 / 2))


def test_large_batches_are_measured_on_a_part() -> None:
    clock = HandClock()
    workload = Workload.mlp(4, 8, 2, samples=10_000_000)
    speed = measure_speed(workload, repeats=1, clock=clock, pace=Paced(clock, 1.0))
    assert speed.flop_per_s == pytest.approx(workload.with_samples(1024).flop_per_area)


def test_all_ranks_know_all_speeds_and_tile_uses_them(comm: AbstractCommunicator) -> None:
    workload, clock = Workload.mlp(4, 8, 2, samples=16), HandClock()
    pace = Paced(clock, 1.0 + comm.rank)
    speeds = [each.flop_per_s for each in measure_speeds(workload, comm, clock=clock, pace=pace)]
    built = mlp(4, 8, 2, dtype=torch.float32)
    model = tile(built, comm, batch_size=64, speeds="measure", quiet=True, clock=clock, pace=pace)
    assert model.speeds_known
    known = [speed_at(processor.speed, 1.0) for processor in model.cluster.processors]  # over as many samples on each
    assert speeds[0] == pytest.approx(workload.flop_per_area)
    for found in (speeds, known):
        assert [found[0] / speed for speed in found] == pytest.approx([1.0 + rank for rank in range(comm.size)])


@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(0, 1), st.lists(st.integers(1, 3), min_size=1, max_size=3)),
        min_size=1,
        max_size=4,
    ),
    data=st.data(),
)
def test_rows_are_packed_and_found_again(sizes: list[tuple[int, int, int, list[int]]], data: st.DataObject) -> None:
    parts = []
    for units, others, axis, inners in sizes:
        length = units * sum(inners)
        shape = (length, others) if axis == 0 else (others, length)
        # The runs of a whole tensor of seven units, of which this one holds `units`.
        starts = [7 * sum(inners[:index]) for index in range(len(inners))]
        runs = UnitRuns(axis=axis, runs=tuple(zip(starts, inners, strict=True)))
        rows = Rows(torch.arange(length * others, dtype=torch.float32).view(shape), runs)
        assert (rows.per_unit, rows.units) == (others * sum(inners), units)
        start = data.draw(st.integers(0, units))
        parts.append((rows, Span(start, data.draw(st.integers(start, units)))))
    total = sum(span.size * rows.per_unit for rows, span in parts)
    buffer = torch.full((total + 1,), -1.0)
    assert pack(buffer, parts) == total
    assert buffer[-1] == -1
    for rows, span, pieces in blocks(buffer, parts):
        before = 0
        for (_, inner), piece in zip(rows.runs.runs, pieces, strict=True):
            start = before * rows.units + span.start * inner
            assert torch.equal(piece, rows.tensor.narrow(rows.runs.axis, start, span.size * inner))
            before += inner


class _Slow(AbstractRequest):
    """A message that takes so long, whether it is waited for or looked for."""

    def __init__(self, inner: AbstractRequest, machine: Machine, took_s: float) -> None:
        self._inner, self._machine, self._took_s = inner, machine, took_s

    def test(self) -> bool:
        if not self._inner.test():
            return False
        self._pass()
        return True

    def wait(self) -> None:
        self._inner.wait()
        self._pass()

    def _pass(self) -> None:
        self._machine.sleep(self._took_s)
        self._took_s = 0.0


class Links(WrappedCommunicator):
    """Messages take `base_s`, those between ranks 0 and 2 `factor` times as long, on the receiver's own clock."""

    machine = Machine(1.0)
    base_s, factor = 0.01, 1.0

    def irecv(self, tensor: torch.Tensor, source: int, *, tag: int = 0) -> AbstractRequest:
        slow = self.factor if {self.rank, source} == {0, 2} else 1.0
        return _Slow(super().irecv(tensor, source, tag=tag), self.machine, self.base_s * slow)

    def _before(self, operation: str, *, peer: int | None = None, tensor: torch.Tensor | None = None) -> None:
        pass

    def _wrap(self, part: AbstractCommunicator) -> Self:
        wrapped = type(self)(part)
        wrapped.machine = self.machine
        return wrapped


@pytest.mark.ranks(4)
def test_a_slow_link_is_named_on_all_ranks(world: World) -> None:
    built = network()
    cluster = Cluster(processors=tuple(Processor(name=f"p{i}", speed=1.0, host=f"h{i}") for i in range(4)))
    layout = Layout(replicas=tuple(Replica(width=0.5, processors=(f"p{i}", f"p{i + 1}"), heights=(0.5, 0.5)) for i in (0, 2)))

    def body(comm: AbstractCommunicator) -> list[tuple[tuple[str, str] | None, int, float]]:
        slow = Links(comm)
        slow.machine = machine = Machine(1.0)
        model = tile(
            built,
            slow,
            batch_size=SAMPLES,
            speeds=cluster,
            layout=layout,
            reduction="mean",
            quiet=True,
            clock=machine,
            pace=machine,
        )
        machine.model = model
        optimizer = ADAM(model.parameters())
        retiling = Retiling(model, optimizer, retiler=Retiler())
        own = model.comm
        assert isinstance(own, Links)
        x, y = data()

        def go(iterations: int) -> None:
            for _ in range(iterations):
                optimizer.zero_grad()
                torch.autograd.backward(torch.nn.functional.mse_loss(model(model.local(x)), model.local(y)))
                optimizer.step()
                retiling.step()

        go(20)
        assert retiling.watcher is not None
        assert retiling.watcher.alarms == []
        own.factor = 5.0
        go(6)
        return [(alarm.link, alarm.iteration, alarm.slower) for alarm in retiling.watcher.alarms]

    seen = world(body)
    assert all(each == seen[0] for each in seen)
    ((link, iteration, slower),) = seen[0]
    assert link == ("h0", "h2")
    assert iteration <= 24
    assert slower == pytest.approx(5.0, rel=0.1)
