"""`tatami.tile`: an ordinary network, laid over ranks that are not alike."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from tatami.clock import NO_PACE, Clock, Pace
from tatami.cluster import Cluster, listed_speeds
from tatami.comm.agreement import decided_on_root, same_everywhere
from tatami.comm.base import AbstractCommunicator
from tatami.comm.elastic import ElasticCommunicator
from tatami.errors import InputError, PlanError
from tatami.parallel.synchronizing import broadcast_model
from tatami.tiled.batch import on_device
from tatami.tiled.blocks import Blocks, find_blocks, workload_of
from tatami.tiled.bucket_choice import BucketBytes, choose_bucket_bytes
from tatami.tiled.describing import describe
from tatami.tiled.devices import settle_devices, with_memory
from tatami.tiled.following.sample import Sample
from tatami.tiled.following.unchanged import copy_of
from tatami.tiled.local_draws import LocalDraws
from tatami.tiled.losses import LossReduction, check_reduction
from tatami.tiled.measure import at_hosts, measure_network_speeds, measure_speeds
from tatami.tiled.model import TiledModel
from tatami.tiled.overheads import measure_messages
from tatami.tiled.phases import phases_of
from tatami.tiling import DEFAULT_PLANNER, Layout, Plan, plan
from tatami.tiling.cost import AbstractCost
from tatami.workload import Workload, as_probed, check_wire

_SHOWN = 8


def tile(
    model: nn.Module | Callable[[], nn.Module],
    comm: AbstractCommunicator,
    *,
    batch_size: int,
    sample: Any = None,
    speeds: Cluster | Sequence[float] | Literal["equal", "measure"] = "measure",
    planner: str = DEFAULT_PLANNER,
    layout: Layout | None = None,
    cost: AbstractCost | None = None,
    reduction: LossReduction | None = None,
    random: Literal["plain", "local"] = "plain",
    wire: str | None = None,
    bucket_bytes: BucketBytes = None,
    device: torch.device | str | None = None,
    quiet: bool = False,
    clock: Clock | None = None,
    pace: Pace = NO_PACE,
) -> TiledModel:
    """Lay `model` over the ranks of `comm`, each with a tile sized to its speed. Collective.

    Blocks of the model (pairs of linear layers, attention, convolutions: docs/networks.md) are split over their units, all else
    is repeated on every rank of a column; the samples of each batch are split between the columns. A model without blocks is
    laid in columns of one rank. Parameters are those of rank 0.

    Args:
        model: any module; it is not changed. Or a function without arguments that makes one: then no rank has the network twice
            while it is tiled, nor afterwards any of it but its own part (docs/networks.md, Memory).
        comm: from `tatami.init()`. The model sends on a communicator of its own, which `TiledModel.close` gives back.
        batch_size: the global batch that the plan is made for; other batches (the last of an epoch) are cut alike.
        sample: inputs of the network for at least two samples: a tensor, a tuple of arguments, or a mapping of named ones.
            With it attention, gated and convolution pairs are found as well; without it only pairs of linear layers.
        speeds: the ranks' speeds: a `Cluster` (which also tells of links), one number for each rank (only ratios count),
            "measure" (time the model's own work on every rank, and between hosts what messages cost), or "equal".
        planner: one of `tatami.tiling.PLANNERS`; by default the one of least predicted time. It warns where equal shares are
            predicted to be faster than what another one says.
        layout: lie like this instead of planning; processors are named p0, p1, ... by rank, or as the cluster names them.
        cost: what the planner minimises; None for the planner's own choice.
        reduction: what the loss function does with samples, "mean" or "sum": its own `reduction`. Not needed for a `Trainer`,
            which reads it from the loss; a loop written by hand cannot go backward without.
        random: what random layers draw: "plain", what the plain model would, and those that cannot are refused; or "local":
            those that cannot (dropout inside of `nn.LSTM`, functional dropout) draw for each column by itself, its ranks alike,
            reproducible from the seed and the number of the training pass.
        wire: "bfloat16" or "float16": gradients, and sums inside a column, travel so between hosts: half the bytes, rounded
            before and after they are added up (in float32). Every rank has the same bits; they are no longer those of the plain
            run. None: as exact as the weights' dtype. float16 overflows above 65504; bfloat16 does not.
        bucket_bytes: None: all gradients leave together at the end of the backward pass. A number: those of the last blocks
            leave while earlier blocks compute, as soon as so many bytes of them are there. "auto": by the tuning table of this
            cluster, where that is predicted to save time, of a probed cluster of several hosts that all have a core beside the
            threads that compute; else as None.
        device: where this rank computes: "auto" (a card of its host to itself, or else the CPU), "cpu", "cuda" (a card of its
            host, in turn), "cuda:0"; each rank may say another. None: what `tatami run --device` says, or else where the
            weights of `model` are. The network is followed on the CPU; everything else happens on the device (docs/gpus.md).
        quiet: do not print the tiling (rank 0 does otherwise).
        clock, pace: for tests (see `tatami.clock`).

    Raises:
        ModelError: a layer that a tiled run could not compute exactly.
        PlanError: invalid speeds, more ranks than samples or units, or settings that differ between ranks.
        InputError: not a network, one that cannot be copied, or one that is tiled already; networks that differ between ranks
            in more than values; on all ranks: a device that is not there, or what is not done on one.
    """
    plain = _plain(model, comm)
    is_made_here = plain is not model
    if reduction is not None:
        check_reduction(reduction)
    if random not in ("plain", "local"):
        raise InputError(f"random must be 'plain' or 'local', not {random!r}")
    check_wire(wire)
    target = settle_devices(comm, device, model=plain, random=random)
    cluster = _given(speeds, comm)
    if isinstance(comm, ElasticCommunicator):
        layout = _renamed(layout, cluster or Cluster.from_speeds([1.0] * comm.size), comm)
        cluster = None if cluster is None else _named(cluster, comm)
    facts = {
        "batch_size": batch_size,
        "planner": planner,
        "reduction": reduction,
        "random": random,
        "wire": wire,
        "bucket_bytes": bucket_bytes,
        "speeds": cluster,
        "layout": layout,
    }
    same_everywhere(comm, facts, where="tatami.tile", error=PlanError)
    whole = plain if is_made_here else copy_of(plain)
    if target.type != "cpu":
        whole, sample = whole.to("cpu"), on_device(sample, torch.device("cpu"))
    broadcast_model(whole, comm, only_different=is_made_here, where="tatami.tile")
    comm.barrier()  # torch.export patches torch for the whole process meanwhile, and ranks may be threads of one process
    found = find_blocks(whole, sample=sample, random=random)
    same_everywhere(comm, {"blocks": found.blocks}, where="tatami.tile", error=PlanError)
    workload = workload_of(whole, found, samples=batch_size, wire=wire)
    if target.type != "cpu":
        whole = whole.to(target)
    if cluster is None:
        if sample is not None:
            flop = workload.flop(width=1.0, height=1.0) / workload.samples
            given = Sample.of(on_device(sample, target))
            measured = measure_network_speeds(whole, given, comm, flop_per_sample=max(flop, 1.0), clock=clock, pace=pace)
        else:
            # A network without blocks and without a sample cannot be run here; a perceptron stands for it.
            timed = workload if workload.blocks else Workload.mlp(256, 256, 256, samples=256)
            dtype = next(whole.parameters()).dtype
            measured = measure_speeds(timed, comm, dtype=dtype, device=target, clock=clock, pace=pace)
        cluster = at_hosts(Cluster.from_speeds([speed.flop_per_s for speed in measured]), comm)
        cluster = cluster if comm.changes else measure_messages(cluster, comm)
        cluster = _named(with_memory(cluster, comm, target), comm)
    workload = as_probed(workload, cluster)
    if layout is None:
        planned = decided_on_root(comm, functools.partial(plan, planner, cluster=cluster, workload=workload, cost=cost))
        layout = planned.layout
        if comm.rank == 0 and not quiet:
            print(f"tatami: {describe(whole, found, workload=workload).summary}\n{_told(planned)}", flush=True)
    leaving = choose_bucket_bytes(
        bucket_bytes, comm, device=target, layout=layout, cluster=cluster, workload=workload, cost=cost
    )
    generator = torch.Generator()
    generator.set_state(comm.bcast_object(torch.get_rng_state()))
    # Its messages have tags, which are the user's on the user's communicator.
    own = comm.duplicate()
    own.use_device(target)
    if comm.rank == 0 and not quiet and own.on_devices:
        print(f"tatami: {own.describe()}", flush=True)
    tiled = TiledModel(
        whole,
        own,
        found=found,
        layout=layout,
        cluster=cluster,
        speeds_known=not isinstance(speeds, str) or speeds != "equal",
        batch_size=batch_size,
        reduction=reduction,
        phases=phases_of(target, clock=clock, pace=pace),
        generator=generator,
        draws=_draws(generator, found) if random == "local" else None,
        wire=wire,
        bucket_bytes=leaving,
        plain=None if is_made_here else plain,
    )
    if is_made_here:
        gc.collect()  # torch.export leaves cycles behind that hold the whole weights until Python happens to look for them
    return tiled


def _plain(model: nn.Module | Callable[[], nn.Module], comm: AbstractCommunicator) -> nn.Module:
    """The network that was given, or made by the function that was given."""
    given = type(model).__name__
    if isinstance(comm, AbstractCommunicator) and callable(model) and not isinstance(model, nn.Module):
        model = model()
        given = f"a function that returns {type(model).__name__}"
    if isinstance(model, TiledModel):
        raise InputError("this model is tiled already: give the plain network, or lay it out again with tatami.tiled.move")
    if not isinstance(model, nn.Module) or not isinstance(comm, AbstractCommunicator):
        raise InputError(
            "tatami.tile(network, comm, ...) takes a torch.nn.Module and what tatami.init() returned, not "
            f"{given} and {type(comm).__name__}"
        )
    if next(model.parameters(), None) is None:
        raise InputError(f"this {type(model).__name__} has no parameters: there is nothing to train on several ranks")
    return model


def _draws(generator: torch.Generator, found: Blocks) -> LocalDraws:
    return LocalDraws(generator, functions=found.captured.drawing if found.captured is not None else ())


def _given(speeds: Cluster | Sequence[float] | str, comm: AbstractCommunicator) -> Cluster | None:
    """The cluster that `speeds` tells of; None where it is to be measured."""
    if isinstance(speeds, str) and speeds in ("measure", "equal"):
        return at_hosts(Cluster.from_speeds([1.0] * comm.size), comm) if speeds == "equal" else None
    if isinstance(speeds, Cluster):
        cluster = speeds
    else:
        rule = "speeds must be a Cluster, a number > 0 for each rank, 'measure' or 'equal'"
        cluster = Cluster.from_speeds(listed_speeds(speeds, rule=rule, error=PlanError))
    if cluster.size != comm.size and comm.changes:
        return Cluster.from_speeds([1.0] * comm.size)  # what was given is about other members
    if cluster.size != comm.size:
        raise PlanError(f"there are {comm.size} ranks but {cluster.size} speeds; give one for each rank")
    return cluster if cluster is speeds else at_hosts(cluster, comm)


def _named(cluster: Cluster, comm: AbstractCommunicator) -> Cluster:
    """With the members' names, which outlive their ranks, where the ranks have any."""
    if not isinstance(comm, ElasticCommunicator):
        return cluster
    pairs = zip(cluster.processors, comm.names, strict=True)
    return replace(cluster, processors=tuple(replace(each, name=name) for each, name in pairs))


def _renamed(layout: Layout | None, cluster: Cluster, comm: ElasticCommunicator) -> Layout | None:
    """The same with a layout; none where it is one for other members."""
    name_of = {each.name: name for each, name in zip(cluster.processors, comm.names, strict=True)}
    if layout is None or not set(layout.processors) <= set(name_of):
        return None
    columns = tuple(replace(each, processors=tuple(map(name_of.__getitem__, each.processors))) for each in layout.columns)
    return Layout(columns=columns)


def _told(planned: Plan) -> str:
    """The tiling in one line, with the share of the processors' speed that it is predicted to use."""
    columns = " | ".join(_few([" ".join(_few(column.processors)) for column in planned.layout.columns]))
    widths = " + ".join(_few([str(column[0].samples.size) for column in planned.tiling.columns]))
    left_out = f"; left out: {', '.join(planned.left_out)}" if planned.left_out else ""
    rounded = f"; sums travel as {planned.workload.wire}" if planned.workload.wire is not None else ""
    return (
        f"tatami: {planned.planner} lays {planned.tiling.samples} samples x {planned.tiling.units} units as [{columns}], "
        f"samples {widths}; predicted efficiency {1 / (1 + planned.gap):.0%}{left_out}{rounded}"
    )


def _few(words: Sequence[str]) -> Sequence[str]:
    """The first and the last of many."""
    return words if len(words) <= _SHOWN else [*words[: _SHOWN - 2], "...", words[-1]]
