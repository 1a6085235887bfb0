"""What there is to train on, measured: every rank's speed at the real work, and the links between the hosts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tatami.batch import on_device
from tatami.clock import NO_PACE, Clock, Pace
from tatami.cluster import Cluster, Link, Processor, SpeedTable
from tatami.cluster.cores import base_here, memory_here
from tatami.cluster.link import LOCAL_LINK, NETWORK_LINK
from tatami.comm.base import AbstractCommunicator
from tatami.comm.link_probe import measure_links, measure_message_costs, without_messages
from tatami.errors import PlanError, shortened
from tatami.measure.speed_curves import measure_network_curves, with_curves
from tatami.measure.speeds import measure_sample_flop, measure_speeds
from tatami.model.overheads import measure_overheads
from tatami.partition.blocks import find_blocks, workload_of
from tatami.partition.tracing.restore_state import copy_of
from tatami.partition.tracing.sample import Sample
from tatami.runtime.devices import settle_devices, with_memory
from tatami.workload import Workload, has_blocks_of, parse_net

_MIB = 1024 * 1024
_REPEAT_S = 0.25
"""Length of one timing: more than two periods of a container's quota (100 ms), so that it is its share that is measured."""


def probe(
    workload: Workload,
    comm: AbstractCommunicator,
    *,
    net: str | None = None,
    repeats: int = 7,
    device: torch.device | str = "cpu",
    clock: Clock | None = None,
    pace: Pace = NO_PACE,
    cpu_s: Callable[[], float] = time.thread_time,
) -> Cluster:
    """The cluster that the ranks of `comm` make up: the same on every rank. Collective.

    Speeds are flop/s of local compute on `workload`, timed on all ranks at once. A processor's memory is its share of what the
    machine, or the control group that the rank is in, has, less what Python, torch and MPI have taken of it. Figures are
    rounded to what a measurement is good for.

    Args:
        workload: what will be trained.
        net: the sizes that the workload is of (`net_workload`), if it is of such a network. What its samples cost however few
            units a rank has is then measured on CPUs, too, and speeds are of all that work.
        repeats: timings to take the median of.
        device: of this rank, see `tatami.tile`; the memory of a card is its processor's.
        clock, pace: see `tatami.clock`.
        cpu_s: the CPU time of this rank so far.

    Raises:
        PlanError: the workload is not of `net`.
    """
    if net is not None and not has_blocks_of(workload, net):
        raise PlanError(f"net={shortened(net)!r} is not what the workload is of: make it with net_workload(net, samples=...)")
    here = settle_devices(comm, device)
    sample_flop: dict[str, float] = {}
    if net is not None and set(comm.allgather_object(here.type)) == {"cpu"}:
        measured = measure_sample_flop(workload, comm, repeats=repeats, repeat_s=_REPEAT_S, clock=clock, pace=pace)
        beside = _rounded(measured, digits=3)
        sample_flop = {"-".join(map(str, parse_net(net))): beside}
        workload = replace(workload, sample_flop=beside)
    speeds = measure_speeds(workload, comm, repeats=repeats, repeat_s=_REPEAT_S, device=here, clock=clock, pace=pace)
    found = _cluster(comm, sample_flop=sample_flop, clock=clock, pace=pace, cpu_s=cpu_s)
    processors = (
        replace(each, speed=_rounded(speed.flop_per_s, digits=4), spread=_rounded(speed.spread, digits=2))
        for each, speed in zip(found.processors, speeds, strict=True)
    )
    return with_memory(replace(found, processors=tuple(processors)), comm, here)


def probe_network(
    model: nn.Module,
    comm: AbstractCommunicator,
    *,
    sample: Any,
    batch_size: int,
    device: torch.device | str = "cpu",
) -> Cluster:
    """As `probe`, at the speeds of a network itself: a table by size where it is slower for few samples. Collective.

    Args:
        model: the network; it is not changed.
        comm: the ranks.
        sample: inputs of it for at least two samples, as for `tatami.tile`; they are repeated up to the share of a rank.
        batch_size: of all ranks together.
        device: as for `probe`.
    """
    here = settle_devices(comm, device)
    whole = copy_of(model)
    comm.barrier()
    blocks = find_blocks(whole, sample=sample, random="local")
    workload = workload_of(whole, blocks, samples=batch_size)
    kept_bytes = 0.0 if blocks.captured is None else blocks.captured.kept_bytes
    curves = measure_network_curves(
        whole.to(here),
        Sample.of(on_device(sample, here)),
        comm,
        batch_size=batch_size,
        sample_bytes=kept_bytes,
    )
    own = _cluster(comm, sample_flop={}, clock=None, pace=NO_PACE, cpu_s=time.thread_time)
    found = with_curves(own, curves, workload=workload)
    processors = (
        replace(each, speed=_rounded_speed(each.speed), spread=_rounded(curve.spread, digits=2))
        for each, curve in zip(found.processors, curves, strict=True)
    )
    return with_memory(replace(found, processors=tuple(processors)), comm, here)


def _cluster(
    comm: AbstractCommunicator, *, sample_flop: dict[str, float], clock: Clock | None, pace: Pace, cpu_s: Callable[[], float]
) -> Cluster:
    """All but the speeds."""
    costs = measure_message_costs(comm, cpu_s=cpu_s)
    # Of a card, its host's; the calls are not timed on the device.
    own = measure_overheads(comm, costs, clock=clock, pace=pace, cpu_s=cpu_s)
    told: list[tuple[int, int]] = comm.allgather_object((memory_here() // comm.local_size, base_here()))
    base_bytes = {host: max(base for (_, base), at in zip(told, comm.hosts, strict=True) if at == host) for host in comm.hosts}
    memory_bytes = [max(_MIB, share - base_bytes[host]) for (share, _), host in zip(told, comm.hosts, strict=True)]
    processors = tuple(
        Processor(
            name=f"p{rank}",
            speed=1.0,
            message_s=_rounded(overheads.message_s, digits=3),
            copy_bytes_per_s=_rounded_bandwidth(cost.copy_bytes_per_s),
            call_s=_rounded(overheads.call_s, digits=3),
            step_s=_rounded(overheads.step_s, digits=3),
            host=host,
            memory_bytes=memory // _MIB * _MIB,
        )
        for rank, (cost, overheads, host, memory) in enumerate(zip(costs, own, comm.hosts, memory_bytes, strict=True))
    )
    messages_s = [cost.message_s for cost in costs]
    wires = without_messages(measure_links(comm), comm.hosts, messages_s)
    links = {hosts: _rounded_link(link) for hosts, link in wires.items()}
    return Cluster(
        processors=processors,
        local=_slowest(links, of_one_host=True) or LOCAL_LINK,
        network=_slowest(links, of_one_host=False) or NETWORK_LINK,
        links=links if len(set(comm.hosts)) > 1 else {},
        sample_flop=sample_flop,
    )


def _slowest(links: Mapping[tuple[str, str], Link], *, of_one_host: bool) -> Link | None:
    """The slowest of the local links, or of those between hosts; None where there is none."""
    chosen = [link for (one, other), link in links.items() if (one == other) is of_one_host]
    return min(chosen, key=lambda link: link.bandwidth_bytes_per_s, default=None)


def _rounded_bandwidth(bandwidth_bytes_per_s: float) -> float:
    """In bits, as it is written."""
    return _rounded(8 * bandwidth_bytes_per_s, digits=3) / 8


def _rounded_link(link: Link) -> Link:
    return Link(
        bandwidth_bytes_per_s=_rounded_bandwidth(link.bandwidth_bytes_per_s), latency_s=_rounded(link.latency_s, digits=3)
    )


def _rounded_speed(speed: float) -> float:
    """Each point rounded, unless a larger tile would take less time then."""
    if not isinstance(speed, SpeedTable):
        return _rounded(speed, digits=4)
    points: list[tuple[float, float]] = []
    for size, own in speed.points:
        last_s = points[-1][0] / points[-1][1] if points else 0.0
        size, own = _rounded(size, digits=6), _rounded(own, digits=4)
        points.append((size, own if size / own >= last_s else size / last_s))
    return SpeedTable(points)


def _rounded(value: float, *, digits: int) -> float:
    return float(f"{value:.{digits}g}")
