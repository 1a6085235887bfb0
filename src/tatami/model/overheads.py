"""What an iteration costs a rank beside flop and bytes: calls and messages, measured where they arise.

A message of a burst costs a third of one in an iteration: there, caches hold what was computed last, sockets are looked at for
each message, and Python builds and adds. So small networks are trained, on all ranks at once, in which next to nothing is
computed or sent.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.utils import _python_dispatch as dispatch

from tatami.clock import NO_PACE, Clock, Pace, SystemClock
from tatami.cluster import Cluster, Link
from tatami.comm.base import AbstractCommunicator
from tatami.comm.link_probe import MessageCost, core_share, measure_links, measure_message_costs, without_messages
from tatami.measure.speeds import at_hosts
from tatami.model.model import TiledModel
from tatami.partition.blocks import find_blocks
from tatami.runtime.phases import phases_of
from tatami.tiling import AlphaBetaCost, Layout, Replica

_TOGETHER = 8
"""Number of ranks that measure together: each has a message for every other one."""
_FEW_BLOCKS, _MANY_BLOCKS = 1, 4
_ITERATIONS = 10
_MESSAGE_REPEATS = 3
_SMALL_REPEATS, _LARGE_REPEATS, _LINK_BYTES = 9, 3, 512 * 1024
_MOST_LINKS = 8
"""Most links that are measured; with many hosts, those of neighbours in the order of their names."""
_SAME_KIND = 1.25
"""Bandwidths up to this factor above the slowest are measurements of links of one kind: a busy machine alone makes as much."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Overheads of one rank, as `tatami.cluster.Processor` has them: CPU time over the share of a core that it gets.

    Attributes:
        call_s: seconds for each block of an iteration.
        step_s: seconds for the iteration.
        message_s: seconds for each message that is sent, or received.
    """

    call_s: float
    step_s: float
    message_s: float


def measure_overheads(
    comm: AbstractCommunicator,
    bursts: Sequence[MessageCost],
    *,
    repeats: int = 5,
    clock: Clock | None = None,
    device: torch.device = _CPU,
    pace: Pace = NO_PACE,
    cpu_s: Callable[[], float] = time.thread_time,
) -> list[Overheads]:
    """Measures the overheads of every rank; all ranks get the same list. Collective.

    Three small networks: of one block and of four, whose gradients are summed over all ranks, and the one of four in one
    replica, which sums outputs. Blocks make the difference of the first two, messages that of the last two, and the rest is the
    iteration's.

    Args:
        comm: the ranks.
        bursts: what a message costs every rank in a burst (`measure_message_costs`): in an iteration it costs no less, though
            the difference of two noisy timings may.
        repeats: timings to take the median of; one more, which warms up, is not counted.
        clock: of the wall.
        device: on which this rank computes.
        pace: see `tatami.clock`.
        cpu_s: the CPU time of this rank so far.
    """
    clock = clock or SystemClock()
    share = core_share(clock=clock, cpu_s=cpu_s, pace=pace)
    # What slows computing down in an emulation leaves messages alone.
    own_share = share if pace is NO_PACE else core_share(clock=SystemClock(), cpu_s=time.thread_time)
    group = comm.split(comm.rank % math.ceil(comm.size / _TOGETHER), key=comm.rank)
    assert group is not None
    group.wait_rarely()
    names = [f"p{rank}" for rank in range(group.size)]
    row = Layout(replicas=tuple(Replica(width=1 / len(names), processors=(name,), heights=(1.0,)) for name in names))
    replica = Layout(replicas=(Replica(width=1.0, processors=tuple(names), heights=(1 / len(names),) * len(names)),))
    spent_s, messages = [], []
    for layout, blocks in ((row, _FEW_BLOCKS), (row, _MANY_BLOCKS), (replica, _MANY_BLOCKS)):
        model = small_model(group, layout, blocks=blocks, device=device)
        # A mode that looks at each operation (a paced lab's, a profiler) takes longer than these operations: 3 ms for a call
        # of 0.4 ms. That is not what the machine needs.
        with dispatch._disable_current_modes():
            spent_s.append(_iteration_s(model, repeats=repeats, pace=pace, cpu_s=cpu_s))
        messages.append(messages_of(model))
        model.close()
    group.close()
    found = overheads_of(spent_s, messages=messages, least_message_s=own_share * bursts[comm.rank].message_s)
    mine = Overheads(call_s=found.call_s / share, step_s=found.step_s / share, message_s=found.message_s / own_share)
    return list(comm.allgather_object(mine))


def overheads_of(spent_s: Sequence[float], *, messages: Sequence[float], least_message_s: float = 0.0) -> Overheads:
    """
    Args:
        spent_s: CPU seconds of an iteration over each of the three networks.
        messages: how many each has.
        least_message_s: CPU seconds that a message takes at least.
    """
    few_s, many_s, replica_s = spent_s
    call_s = max(0.0, (many_s - few_s) / (_MANY_BLOCKS - _FEW_BLOCKS))
    more = messages[2] - messages[1]
    message_s = max(least_message_s, (replica_s - many_s) / more if more else 0.0)
    step_s = max(0.0, few_s - _FEW_BLOCKS * call_s - messages[0] * message_s)
    return Overheads(call_s=call_s, step_s=step_s, message_s=message_s)


def measure_messages(cluster: Cluster, comm: AbstractCommunicator, *, device: torch.device = _CPU) -> Cluster:
    """`cluster` with what calls and messages cost its processors, and with the slowest of some links between its hosts.

    Collective. It takes some seconds; `tatami probe` takes longer and measures each link. Among CPUs of one host there is
    nothing to measure that a plan would depend on. Where some compute on a GPU there is: whether others are worth their calls.

    Args:
        cluster: the processors of all ranks.
        comm: the ranks.
        device: on which this rank computes.
    """
    hosts = sorted(set(comm.hosts))
    if len(hosts) == 1 and (comm.size == 1 or not any(comm.allgather_object(device.type != "cpu"))):
        return cluster
    costs = measure_message_costs(comm, repeats=_MESSAGE_REPEATS)
    own = measure_overheads(comm, costs, repeats=_MESSAGE_REPEATS, device=device)
    network = cluster.network if len(hosts) == 1 else _slowest_link(comm, hosts, costs)
    processors = (
        replace(
            each,
            message_s=overheads.message_s,
            call_s=overheads.call_s,
            step_s=overheads.step_s,
            copy_bytes_per_s=cost.copy_bytes_per_s,
        )
        for each, overheads, cost in zip(cluster.processors, own, costs, strict=True)
    )
    return replace(cluster, processors=tuple(processors), network=network)


def _slowest_link(comm: AbstractCommunicator, hosts: Sequence[str], costs: Sequence[MessageCost]) -> Link:
    """The slowest of some links between neighbours in the order of their names. Collective."""
    around = [tuple(sorted(pair)) for pair in zip(hosts, [*hosts[1:], hosts[0]], strict=True)]
    some = {(one, other) for one, other in around[:: math.ceil(len(around) / _MOST_LINKS)]}
    links = measure_links(comm, small_repeats=_SMALL_REPEATS, large_repeats=_LARGE_REPEATS, large_bytes=_LINK_BYTES, pairs=some)
    return slowest_of(without_messages(links, comm.hosts, [cost.message_s for cost in costs]).values())


def slowest_of(links: Iterable[Link]) -> Link:
    """The slowest kind of these links: the slowest of several measurements of one kind would be slower than any of them is."""
    slowest_first = sorted(links, key=lambda link: link.bandwidth_bytes_per_s)
    limit = _SAME_KIND * slowest_first[0].bandwidth_bytes_per_s
    same = [link for link in slowest_first if link.bandwidth_bytes_per_s <= limit]
    return same[(len(same) - 1) // 2]


def small_model(comm: AbstractCommunicator, layout: Layout, *, blocks: int, device: torch.device = _CPU) -> TiledModel:
    """A perceptron of two units and two samples for each rank, laid like this. Collective."""
    whole = nn.Sequential(*(layer for _ in range(blocks) for layer in (_linear(comm.size), nn.Sigmoid(), _linear(comm.size))))
    own = comm.duplicate()
    own.use_device(device)
    return TiledModel(
        whole.to(device),
        own,
        found=find_blocks(whole, sample=None, random="plain"),
        layout=layout,
        cluster=at_hosts(Cluster.from_speeds([1.0] * comm.size), comm),
        speeds_known=True,
        batch_size=2 * comm.size,
        reduction="mean",
        phases=phases_of(device),
        generator=torch.Generator(),
        plain=None,
    )


def _linear(ranks: int) -> nn.Module:
    """A layer of zeros: weights that are drawn would change what the user's program draws next."""
    layer = nn.Linear(2 * ranks, 2 * ranks, dtype=torch.float32, device="meta").to_empty(device="cpu")
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def _iteration_s(model: TiledModel, *, repeats: int, pace: Pace, cpu_s: Callable[[], float]) -> float:
    """CPU seconds of an iteration."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    size = 2 * model.comm.size
    inputs, outputs = (torch.zeros(size, size, dtype=torch.float32, device="cpu") for _ in range(2))
    timings = []
    for _ in range(repeats + 1):
        start_s = cpu_s()
        for _ in range(_ITERATIONS):
            pace.begin()
            x, y = model.local(inputs, outputs)
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            pace.end()
        timings.append((cpu_s() - start_s) / _ITERATIONS)
    return statistics.median(timings[1:])


def messages_of(model: TiledModel) -> float:
    """How many an iteration has for a rank, sent and received, as the cost model counts them."""
    totals = []
    for message_s in (1.0, 0.0):
        dear = tuple(replace(each, message_s=message_s) for each in model.cluster.processors)
        cluster = replace(model.cluster, processors=dear)
        totals.append(AlphaBetaCost().price(model.layout, cluster=cluster, workload=model.workload).total)
    return round(totals[0] - totals[1])
