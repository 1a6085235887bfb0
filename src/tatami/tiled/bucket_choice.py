"""Whether gradients leave while earlier blocks compute: decided from facts, before the run, and the same on all ranks."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Literal

import torch

from tatami.cluster import Cluster
from tatami.cluster.cores import cores_here
from tatami.comm.agreement import decided_on_root
from tatami.comm.base import AbstractCommunicator
from tatami.comm.tuning import tuned_bucket_bytes
from tatami.errors import InputError
from tatami.parallel.buckets import BUCKET_BYTES
from tatami.tiling import Layout, hiding_pays
from tatami.tiling.cost import AbstractCost
from tatami.workload import Workload

BucketBytes = int | Literal["auto"] | None


def choose_bucket_bytes(
    wanted: BucketBytes,
    comm: AbstractCommunicator,
    *,
    device: torch.device,
    layout: Layout,
    cluster: Cluster,
    workload: Workload,
    cost: AbstractCost | None,
) -> int | None:
    """`Workload.bucket_bytes` of a tiled model. Collective.

    On a device, the host would wait for the device's work of a bucket to send it, and elastic ranks must have all gradients of
    an update or none. There all gradients leave together.

    Args:
        wanted: see `tatami.tile`.
        comm: all ranks.
        device: of this rank.
        layout: how the ranks lie.
        cluster: the machines and their links, as they are known.
        workload: what is laid out.
        cost: predicts what is gained.

    Raises:
        InputError: a number of bytes where all gradients leave together, or what is not one.
    """
    if wanted is None:
        return None
    if wanted != "auto" and (not isinstance(wanted, int) or wanted < 1):
        raise InputError(f"bucket_bytes must be a number of bytes, at least 1, 'auto' or None, not {wanted!r}")
    if comm.changes:
        _refuse_number(wanted, why="the ranks of an elastic run may change")
        return None
    told = comm.allgather_object((device.type == "cpu", torch.get_num_threads(), cores_here()))
    on_device = [rank for rank, (on_cpu, _, _) in enumerate(told) if not on_cpu]
    if on_device:
        _refuse_number(wanted, why=f"rank {on_device[0]} is on a device")
        return None
    if wanted != "auto":
        return wanted
    # Where messages or links were not measured, it is not known that they cost less than they hide.
    measured = all(processor.message_s > 0 for processor in cluster.processors)
    busy = Counter[str]()
    for host, (_, threads, _) in zip(comm.hosts, told, strict=True):
        busy[host] += threads
    spare = all(busy[host] + 1 <= cores for host, (_, _, cores) in zip(comm.hosts, told, strict=True))
    if not measured or not spare or len(busy) == 1:
        return None
    size_bytes = tuned_bucket_bytes(comm) or BUCKET_BYTES
    pays = functools.partial(hiding_pays, layout, cluster=cluster, workload=workload, bucket_bytes=size_bytes, cost=cost)
    return size_bytes if decided_on_root(comm, pays) else None


def _refuse_number(wanted: BucketBytes, *, why: str) -> None:
    if wanted != "auto":
        raise InputError(f"bucket_bytes={wanted}: {why}, where all gradients leave together; give None, or 'auto'")
