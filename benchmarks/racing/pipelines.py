"""`torch.distributed.pipelining`, as good as one gets it by hand: cuts by whole layers, schedules, numbers of micro-batches.

A closed form says which cuts and numbers are worth a try; each of those is timed in one iteration, and the fastest takes part.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations_with_replacement, pairwise
from typing import Any, final

import torch
import torch.distributed
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from racing.contestants import LEARNING_RATE, AbstractRacer, CannotError, Weights
from racing.networks import Network
from tatami.cluster import Cluster
from tatami.comm.base import AbstractCommunicator
from tatami.tiling import Span, largest_remainder

_NUMBERS = (2, 4, 8, 16, 32)
"""Micro-batches."""
_TRIED, _WORTH = 2, 1.5
"""So many numbers of micro-batches are tried for each closed form, if predicted to take less than so many times as long as
the best: the closed form does not know what a micro-batch costs in Python."""
SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A way to run one.

    Attributes:
        counts: pieces of every host, in their order; hosts without any take no part.
        micro_batches: of the global batch.
        schedule: one of `SCHEDULES`.
        predicted_s: by the closed form.
        taken_s: of one iteration, where it was tried.
    """

    counts: tuple[int, ...]
    micro_batches: int
    schedule: str = "1F1B"
    predicted_s: float = 0.0
    taken_s: float | None = None


def _taken_s(pipeline: Pipeline) -> float:
    assert pipeline.taken_s is not None
    return pipeline.taken_s


@dataclass(frozen=True, kw_only=True)
class PieceTimes:
    """What each piece takes for a micro-batch, on a host of speed 1, and what it hands on.

    Attributes:
        forward_backward_s: by piece.
        handed_bytes: by piece.
    """

    forward_backward_s: tuple[float, ...]
    handed_bytes: tuple[int, ...]


def time_pieces(network: Network, *, micro_batches: int) -> PieceTimes:
    """Of this rank, piece by piece, over the first micro-batch."""
    count = len(network.x) // micro_batches
    x, y = network.x[:count], network.y[:count]
    pieces = network.pieces(copy.deepcopy(network.model))
    times_s, sizes = [], []
    for index, piece in enumerate(pieces):
        x = x.detach().requires_grad_(x.is_floating_point())
        start_s = time.monotonic()
        result = piece(x)
        last = index == len(pieces) - 1
        torch.autograd.backward(network.loss(result, y) if last else result, None if last else torch.zeros_like(result))
        times_s.append(time.monotonic() - start_s)
        x = result
        sizes.append(result.numel() * result.element_size())
    return PieceTimes(forward_backward_s=tuple(times_s), handed_bytes=tuple(sizes))


def predicted_s(
    counts: Sequence[int], pieces: PieceTimes, *, micro_batches: int, speeds: Sequence[float], bandwidth: float, hidden: bool
) -> float:
    """sum t_i + 2 sum c_i + (m - 1) tau: the same for both schedules.

    Args:
        counts: pieces of every host.
        pieces: their times and bytes.
        micro_batches: m.
        speeds: of the hosts, in those of the one that timed the pieces.
        bandwidth: of the links, in bytes/s.
        hidden: whether a stage computes while it hands over: tau is the longest t_i or c_(i-1) + c_i, not their sum.
    """
    stages_s, sends_s, first = [], [0.0], 0
    for count, speed in zip(counts, speeds, strict=True):
        if count:
            stages_s.append(sum(pieces.forward_backward_s[first : first + count]) / speed)
            first += count
            sends_s.append(pieces.handed_bytes[first - 1] / bandwidth)
    sends_s[-1] = 0.0
    waits_s = [one + other for one, other in pairwise(sends_s)]
    both = zip(stages_s, waits_s, strict=True)
    longest_s = max(max(each) if hidden else sum(each) for each in both)
    return sum(stages_s) + 2 * sum(sends_s) + (micro_batches - 1) * longest_s


def _all_counts(num_pieces: int, num_hosts: int) -> Iterator[tuple[int, ...]]:
    """Every way to give consecutive pieces to hosts, to two of them at least."""
    for cuts in combinations_with_replacement(range(num_pieces + 1), num_hosts - 1):
        counts = tuple(stop - start for start, stop in pairwise((0, *cuts, num_pieces)))
        if _num_stages(counts) > 1:
            yield counts


def candidates(times: dict[int, PieceTimes], *, speeds: Sequence[float], bandwidth: float) -> list[Pipeline]:
    """What is worth a try: the best of the closed form with hidden hand-overs and with blocking ones, and, in as many
    micro-batches as the best of them, the pieces dealt out in proportion to the speeds of all hosts.

    Args:
        times: by number of micro-batches.
        speeds, bandwidth: as for `predicted_s`.
    """
    num_pieces, total = len(next(iter(times.values())).handed_bytes), sum(speeds)
    even = tuple(largest_remainder([speed / total for speed in speeds], total=num_pieces))
    found: dict[tuple[tuple[int, ...], int], Pipeline] = {}
    for hidden in (True, False):

        def priced(counts: tuple[int, ...], number: int, *, hidden: bool = hidden) -> Pipeline:
            price = predicted_s(counts, times[number], micro_batches=number, speeds=speeds, bandwidth=bandwidth, hidden=hidden)
            return Pipeline(counts=counts, micro_batches=number, predicted_s=price)

        best = []
        for number in times:
            # 1F1B has at least as many micro-batches as stages.
            own = [priced(each, number) for each in _all_counts(num_pieces, len(speeds)) if _num_stages(each) <= number]
            best += sorted(own, key=lambda each: each.predicted_s)[:1]
        best.sort(key=lambda each: each.predicted_s)
        chosen = [each for each in best if each.predicted_s <= _WORTH * best[0].predicted_s][:_TRIED]
        if 1 < _num_stages(even) <= max(times):
            enough = [each.micro_batches for each in chosen if each.micro_batches >= _num_stages(even)]
            chosen.append(priced(even, (enough or [max(times)])[0]))
        for each in chosen:
            found.setdefault((each.counts, each.micro_batches), each)
    return list(found.values())


def _num_stages(counts: Sequence[int]) -> int:
    return sum(count > 0 for count in counts)


@final
class Pipelining(AbstractRacer):
    """The fastest of the pipelines that were tried."""

    def __init__(self, network: Network, comm: AbstractCommunicator, *, cluster: Cluster) -> None:
        if network.batch_norm:
            raise CannotError("batch normalization takes the statistics of each micro-batch, which is another training")
        self._network, self._comm = network, comm
        self.statistics = [Span(0, len(network.x))]
        speeds = [float(each.speed) for each in cluster.processors]
        timer = speeds.index(max(speeds))
        numbers = [each for each in _NUMBERS if len(network.x) % each == 0]
        listed: list[Pipeline] | None = None
        if comm.rank == timer:
            times = {number: time_pieces(network, micro_batches=number) for number in numbers}
            bandwidth = cluster.network.bandwidth_bytes_per_s
            listed = candidates(times, speeds=[each / max(speeds) for each in speeds], bandwidth=bandwidth)
        listed = comm.bcast_object(listed, root=timer)
        self._tried: list[Pipeline] = []
        best = min((self._try(each) for each in listed), key=_taken_s)
        best = min(best, self._try(replace(best, schedule="GPipe")), key=_taken_s)
        self._chosen = best
        self._set(best)

    def _try(self, pipeline: Pipeline) -> Pipeline:
        """One iteration; each finds out shapes on the way."""
        self._set(pipeline)
        self._comm.barrier()
        start_s = time.monotonic()
        self.step()
        taken_s = max(self._comm.allgather_object(time.monotonic() - start_s))
        self._tried.append(replace(pipeline, taken_s=taken_s))
        return self._tried[-1]

    def _set(self, pipeline: Pipeline) -> None:
        """Begin anew like this, from the same weights."""
        ranks = [rank for rank, count in enumerate(pipeline.counts) if count]
        group = torch.distributed.new_group(ranks)
        self._model = copy.deepcopy(self._network.model)
        self._schedule: Any = None
        self._place, self._num = -1, len(ranks)
        if self._comm.rank not in ranks:
            return
        first = sum(pipeline.counts[: self._comm.rank])
        own = self._network.pieces(self._model)[first : first + pipeline.counts[self._comm.rank]]
        part = nn.Sequential(*own)
        self._place = ranks.index(self._comm.rank)
        stage = PipelineStage(part, self._place, len(ranks), torch.device("cpu"), group=group)
        self._schedule = SCHEDULES[pipeline.schedule](stage, pipeline.micro_batches, loss_fn=self._network.loss)
        self._own = [*part.parameters()]
        self._optimizer = torch.optim.SGD(self._own or [torch.zeros(())], lr=LEARNING_RATE)

    def step(self) -> None:
        if self._schedule is None:
            return
        self._optimizer.zero_grad()
        inputs = (self._network.x,) if self._place == 0 else ()
        if self._place == self._num - 1:
            self._schedule.step(*inputs, target=self._network.y)
        else:
            self._schedule.step(*inputs)
        self._optimizer.step()

    def weights(self) -> Weights:
        mine = {id(each) for each in self._own} if self._schedule is not None else set()
        own = {name: each.detach() for name, each in self._model.named_parameters() if id(each) in mine}
        return {name: each for part in self._comm.allgather_object(own) for name, each in part.items()}

    def facts(self) -> dict[str, Any]:
        return {"pipeline": asdict(self._chosen), "tried": [asdict(each) for each in self._tried]}
