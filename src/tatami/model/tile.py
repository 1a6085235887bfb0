"""`tatami.tile`: an ordinary network, laid over ranks that are not alike."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from tatami.batch import on_device
from tatami.clock import NO_PACE, Clock, Pace
from tatami.cluster import Cluster, listed_speeds
from tatami.comm.agreement import decided_on_root, fail_together, same_everywhere
from tatami.comm.base import AbstractCommunicator
from tatami.comm.elastic import ElasticCommunicator
from tatami.errors import CommTimeoutError, InputError, ModelError, PlanError, warn
from tatami.gradients.parameter_hooks import copy_hooks
from tatami.inputs import check_at_least
from tatami.measure.speed_curves import measure_block_curves, measure_network_curves, with_curves
from tatami.measure.speeds import at_hosts
from tatami.model.describing import describe
from tatami.model.model import TiledModel
from tatami.model.model_stage import StagedNetwork
from tatami.model.overheads import measure_messages
from tatami.model.whole_state import gathered_weights
from tatami.partition.blocks import Blocks, find_blocks, without_blocks, workload_of
from tatami.partition.exactness import BATCH_NORMS, RandomDraws
from tatami.partition.pieces import RecordedNetwork, exact_pieces
from tatami.partition.tracing.restore_state import copy_of
from tatami.partition.tracing.sample import Sample
from tatami.progress import shown
from tatami.random_state import torch_state
from tatami.report.words import in_order
from tatami.runtime.allocator import TIGHT, give_freed_memory_back, trim_once
from tatami.runtime.devices import settle_devices, with_memory
from tatami.runtime.local_draws import LocalDraws
from tatami.runtime.losses import LossReduction, check_reduction
from tatami.runtime.norms import models
from tatami.runtime.overlapped_sums import may_overlap
from tatami.runtime.phases import phases_of
from tatami.same_model import broadcast_model
from tatami.stages.running import release
from tatami.tiling import DEFAULT_PLANNER, AlphaBetaCost, Layout, Plan, StagedLayout, alone_warning
from tatami.tiling.advice import ignores_messages
from tatami.tiling.cost import AbstractCost
from tatami.tiling.memory import memory_bytes, optimizer_shares
from tatami.tiling.recomputing import recomputing_stages
from tatami.tiling.staged import fastest_plan
from tatami.tiling.staged_price import StagedPlan, price_stages
from tatami.units import format_duration
from tatami.workload import Workload, as_probed, check_wire

_SHOWN = 8
SETUP_TIMEOUT_S = 1800.0
"""Longest wait for another rank while the network is set up; in training it is the communicator's own, which is shorter."""


def tile(
    model: nn.Module | Callable[[], nn.Module],
    comm: AbstractCommunicator,
    *,
    batch_size: int,
    sample: Any = None,
    speeds: Cluster | Sequence[float] | Literal["equal", "measure"] = "measure",
    planner: str = DEFAULT_PLANNER,
    layout: Layout | StagedLayout | None = None,
    stages: int | None = None,
    micro_batches: int | None = None,
    recompute: bool | None = None,
    sharded_optimizer: bool = False,
    optimizer_moments: int = 2,
    rescue_copy: bool = True,
    cost: AbstractCost | None = None,
    reduction: LossReduction | None = None,
    random: Literal["plain", "local"] = "plain",
    batch_norm: Literal["global", "local"] = "global",
    wire: str | None = None,
    device: torch.device | str | None = None,
    quiet: bool = False,
    clock: Clock | None = None,
    pace: Pace = NO_PACE,
) -> TiledModel:
    """Lay `model` over the ranks of `comm`, each with a tile sized to its speed. Collective.

    Blocks of the model (pairs of linear layers, attention, convolutions: docs/networks.md) are split over their units, all else
    is repeated on every rank of a replica; the samples of each batch are split between the replicas. A model without blocks is
    laid out in replicas of one rank. Parameters are those of rank 0.

    Args:
        model: any module; it is not changed. Or a function without arguments that makes one: then no rank has the network twice
            while it is tiled, nor afterwards any of it but its own part (docs/networks.md, Memory).
        comm: from `tatami.init()`. The model sends on a communicator of its own, which `TiledModel.close` gives back.
        batch_size: the global batch that the plan is made for; other batches (the last of an epoch) are divided in the same
            proportions.
        sample: inputs of the network for at least two samples: a tensor, a tuple of arguments, or a mapping of named ones.
            With it attention, gated and convolution pairs are found as well; without it only pairs of linear layers.
        speeds: the ranks' speeds: a `Cluster` (which also tells of links), one number for each rank (only ratios count),
            "measure" (time the model's own work on every rank, and between hosts what messages cost), or "equal".
        planner: one of `tatami.tiling.PLANNERS`; by default the one of least predicted time. It warns where equal shares are
            predicted to be faster than what another one says.
        layout: use this layout; skip planning. Processors are named p0, p1, ... by rank, or as the cluster names them.
        stages: into how many pipeline stages each replica is divided (docs/stages.md): 1 for none; None: as many as are
            predicted to be fastest, where a sample is given.
        micro_batches: in how many parts each replica computes its samples, one after another; None: the planner's choice.
        recompute: whether ranks keep only the inputs of the network's repeated layers, and compute their other activations once
            more in the backward pass (docs/networks.md, Memory): True: all; False: none; None: those that the plan chose
            because they lack memory. With pipeline stages all ranks of a stage do, or none.
        sharded_optimizer: each rank updates a shard of the weights and keeps the optimizer's state of that shard alone, a share
            by memory and speed; the others are sent its weights (ZeRO; docs/training.md). Replicas, or their pipeline stages,
            then have one rank each.
        optimizer_moments: tensors as large as a weight that the optimizer keeps for it, which plans count as memory: 2 for Adam
            and AdamW, 1 for SGD with momentum, 0 for plain SGD.
        rescue_copy: whether a `Trainer` keeps a copy of the last good weights, which it saves if the loss stops being finite.
            Plans count it as memory; a loop written by hand keeps none.
        cost: what the planner minimises; None for the planner's own choice.
        reduction: what the loss function does with samples, "mean" or "sum": its own `reduction`. Not needed for a `Trainer`,
            which reads it from the loss; a loop written by hand cannot go backward without.
        random: what random layers draw: "plain", what the plain model would, and those that cannot are refused; or "local":
            those that cannot (dropout inside of `nn.LSTM`, functional dropout) draw for each replica by itself, its ranks
            the same, reproducible from the seed and the number of the training pass.
        batch_norm: whose statistics batch normalization takes: "global", those of the global batch, as one machine does; or
            "local": those of each replica's own samples, as DDP does. That is not exact: results depend on the layout. It saves
            two sums over all ranks for each layer and iteration. Running statistics are averaged over the replicas after every
            forward pass in training, weighed by their samples, so that all ranks hold the same.
        wire: "bfloat16" or "float16": gradients, and sums inside a replica, travel so between hosts: half the bytes, rounded
            before and after they are added up (in float32). Every rank has the same bits; they are no longer those of the plain
            run. None: as exact as the weights' dtype. float16 overflows above 65504; bfloat16 does not.
        device: where this rank computes: "auto" (a card of its host to itself, or else the CPU), "cpu", "cuda" (a card of its
            host, in turn), "cuda:0"; each rank may say another. None: what `tatami run --device` says, or else where the
            weights of `model` are. The network is followed on the CPU; everything else happens on the device (docs/gpus.md).
        quiet: do not print the tiling (rank 0 does otherwise).
        clock, pace: for tests (see `tatami.clock`).

    Raises:
        ModelError: a layer that a tiled run could not compute exactly.
        PlanError: invalid speeds, more ranks than samples times units, or settings that differ between ranks; more stages than
            the network has pieces, or more micro-batches than there are samples.
        InputError: not a network, one that cannot be copied, or one that is tiled already; networks that differ between ranks
            in more than values; on all ranks: a device that is not there, or what is not done on one.
    """
    plain = _plain(model, comm)
    _refuse_shared(plain)
    is_made_here = plain is not model
    if reduction is not None:
        check_reduction(reduction)
    if random not in ("plain", "local"):
        raise InputError(f"random must be 'plain' or 'local', not {random!r}")
    if batch_norm not in ("global", "local"):
        raise InputError(f"batch_norm must be 'global' or 'local', not {batch_norm!r}")
    check_wire(wire)
    check_at_least(1, batch_size=batch_size, stages=stages, micro_batches=micro_batches)
    check_at_least(0, optimizer_moments=optimizer_moments)
    if layout is not None and stages is not None:
        raise InputError(f"give tatami.tile a layout or a number of stages, not both; the layout is {layout.to_json()}")
    if layout is not None and micro_batches is not None:
        layout = layout.in_micro_batches(micro_batches)
    if recompute is False and layout is not None and layout.recomputes:
        raise InputError(f"recompute=False, and the layout has {layout.recomputes[0]} recompute: leave one of them out")
    if recompute and isinstance(layout, Layout):  # it is not known yet which stages can
        layout = layout.recomputing()
    with _setting_up(comm):  # the first meeting after each has made or loaded its network
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
        "batch_norm": batch_norm,
        "wire": wire,
        "speeds": cluster,
        "layout": layout,
        "stages": stages,
        "micro_batches": micro_batches,
        "recompute": recompute,
        "sharded_optimizer": sharded_optimizer,
        "optimizer_moments": optimizer_moments,
        "rescue_copy": rescue_copy,
    }
    # An elastic run may begin, or begin again, with fewer ranks than stages, as one that joins it does.
    planned_stages = None if comm.changes and stages is not None and stages > comm.size else stages
    asks_stages = isinstance(layout, StagedLayout) or (stages is not None and stages > 1)
    if sharded_optimizer:
        _refuse_asked_shards(layout)
    if asks_stages:
        _refuse_asked_stages(sample=sample, random=random, batch_norm=batch_norm)
    with _setting_up(comm), shown(comm.rank == 0 and not quiet):
        same_everywhere(comm, facts, where="tatami.tile", error=PlanError)
        whole = plain if is_made_here else copy_of(plain)
        if not is_made_here:
            for parameter, copied in zip(plain.parameters(), whole.parameters(), strict=True):
                copy_hooks(parameter, copied)  # copy.deepcopy leaves them behind
        if target.type != "cpu":
            whole, sample = whole.to("cpu"), on_device(sample, torch.device("cpu"))
        memory = None if cluster is None or target.type != "cpu" else cluster.processors[comm.rank].memory_bytes
        if memory is not None and sum(each.nbytes for each in whole.parameters()) > TIGHT * memory:
            give_freed_memory_back()
        broadcast_model(whole, comm, only_different=is_made_here, where="tatami.tile")
        comm.barrier()  # torch.export patches torch for the whole process meanwhile, and ranks may be threads of one process
        found = find_blocks(whole, sample=sample, random=random, batch_size=batch_size)
        same_everywhere(comm, {"blocks": found.blocks}, where="tatami.tile", error=PlanError)
        if found.captured is not None and found.captured.reads and comm.rank == 0 and (comm.size > 1 or comm.changes):
            warn(
                f"the forward pass reads a number that depends on several samples of the batch at {found.captured.reads}. Each "
                "rank reads that of its own samples: if anything that is computed depends on it (a branch), results are not "
                "those of one machine. Decide for each sample by itself (torch.where), or outside of the network"
            )
        if sharded_optimizer:
            found = without_blocks(whole, found, random=random)
        workload = workload_of(
            whole,
            found,
            samples=batch_size,
            wire=wire,
            local_statistics=batch_norm == "local",
            sharded_optimizer=sharded_optimizer,
            optimizer_moments=optimizer_moments,
            rescue_copy=rescue_copy,
        )
        network = None
        is_plain = random == "plain" and batch_norm == "global"
        is_free = planner == DEFAULT_PLANNER and layout is None and stages is None and is_plain
        can_be = sample is not None and (comm.size > 1 or comm.changes)
        if asks_stages or (is_free and can_be):
            network = _recorded(whole, found, sample, random=random, is_needed=asks_stages, fewest=stages or 1)
        if target.type != "cpu":
            whole = whole.to(target)
        if cluster is None:
            if sample is not None:
                kept_bytes = found.captured.kept_bytes if found.captured is not None else 0.0
                given = Sample.of(on_device(sample, target))
                curves = measure_network_curves(
                    whole, given, comm, batch_size=batch_size, sample_bytes=kept_bytes, clock=clock, pace=pace
                )
                timed = workload
            else:
                # A network without blocks and without a sample cannot be run here; a perceptron stands for it.
                timed = workload if workload.blocks else Workload.mlp(256, 256, 256, samples=batch_size)
                curves = measure_block_curves(
                    timed, comm, dtype=next(whole.parameters()).dtype, device=target, clock=clock, pace=pace
                )
            cluster = at_hosts(Cluster.from_speeds([1.0] * comm.size), comm)
            cluster = cluster if comm.changes else measure_messages(cluster, comm, device=target)
            cluster = with_curves(cluster, curves, workload=timed)
            cluster = _named(with_memory(cluster, comm, target), comm)
        workload = replace(workload, recompute=recompute)
        if recompute and workload.recomputation is None:
            raise InputError(
                "recompute=True needs a network with repeated layers that can be computed once more, and this one has none "
                "(docs/networks.md, Memory): leave recompute out, or give tatami.tile a sample if it has none"
            )
        pieces = () if network is None else network.pieces_with(found, workload.blocks)
        on_cpus = all(comm.allgather_object(target.type == "cpu"))
        workload = replace(
            as_probed(workload, cluster),
            micro_batches=micro_batches or workload.micro_batches,
            pieces=pieces,
            overlaps_sums=on_cpus and may_overlap(comm),
        )
        if recompute and isinstance(layout, StagedLayout):
            layout = recomputing_stages(layout, workload=workload)
        planned: Plan | StagedPlan | None = None
        if layout is None:
            decide = functools.partial(
                fastest_plan, planner, cluster=cluster, workload=workload, cost=cost, stages=planned_stages, idle=True
            )
            planned = decided_on_root(comm, decide)
    if planned is not None:
        layout = planned.layout
        if comm.rank == 0 and not quiet:
            is_local = batch_norm == "local" and any(isinstance(each, BATCH_NORMS) for each in whole.modules())
            local = "; batch normalization takes each replica's own statistics (not exact)" if is_local else ""
            print(
                f"tatami: {describe(whole, found, workload=workload).summary}\n{_told(planned, cluster, cost)}{local}",
                flush=True,
            )
            if isinstance(planned, Plan) and (told := alone_warning(planned, cluster=cluster, cost=cost)):
                warn(told)
    assert layout is not None
    given_bytes = cluster.processors[comm.rank].memory_bytes
    if given_bytes is not None and target.type == "cpu":
        if isinstance(layout, StagedLayout):
            kept_bytes_of = price_stages(layout, cluster=cluster, workload=workload).memory_bytes
        else:
            kept_bytes_of = dict(memory_bytes(layout, workload=workload, cluster=cluster, ranks=comm.size))
        if kept_bytes_of.get(cluster.processors[comm.rank].name, 0.0) > TIGHT * given_bytes:
            give_freed_memory_back()
    generator = torch.Generator()
    generator.set_state(comm.bcast_object(torch_state()))
    # Its messages have tags, which are the user's on the user's communicator.
    own = comm.duplicate()
    own.use_device(target)
    phases = phases_of(target, clock=clock, pace=pace)
    stage = staged = None
    if network is not None:
        priced = cost if isinstance(cost, AlphaBetaCost) else None
        staged = StagedNetwork(network=network, found=found, workload=workload, cost=priced, stages=stages)
    if isinstance(layout, StagedLayout):
        assert staged is not None
        stage = staged.stage(
            own,
            layout,
            cluster=cluster,
            generator=generator,
            phases=phases,
            plan=planned if isinstance(planned, StagedPlan) else None,
        )
        stage.follow(whole)
        release(whole, staging=stage.staging, stage=stage.index)
        found = stage.blocks_of(found)
        layout = stage.own_layout
    shares: Mapping[str, float] = {}
    if sharded_optimizer:
        if stage is None:
            shares = optimizer_shares(layout, workload=workload, cluster=cluster, ranks=comm.size)
        elif stage.plan is not None:
            shares = stage.plan.optimizer_shares
        if comm.rank == 0 and not quiet and comm.size > 1:
            parts = " ".join(_few([f"{shares.get(each.name, 0.0):.0%}" for each in cluster.processors]))
            of_stage = "" if stage is None else " of its stage"
            print(f"tatami: the optimizer is sharded: {parts} of the weights{of_stage} are updated by each rank", flush=True)
    own_names = [each.name for each in cluster.processors if stage is None or each.name in layout.processors]
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
        phases=phases,
        generator=generator,
        draws=LocalDraws(generator, functions=found.captured.drawing if found.captured else ()) if random == "local" else None,
        wire=wire,
        local_statistics=batch_norm == "local",
        plain=model,
        gather=gathered_weights,
        stage=stage,
        staged=staged,
        shard_fractions=[shares.get(name, 0.0) for name in own_names] if sharded_optimizer else None,
        recompute=recompute,
        optimizer_moments=optimizer_moments,
        rescue_copy=rescue_copy,
    )
    if is_made_here:
        gc.collect()  # torch.export leaves cycles behind that hold the whole weights until Python happens to look for them
        trim_once()
    return tiled


def _refuse_asked_shards(layout: Layout | StagedLayout | None) -> None:
    """
    Raises:
        InputError: a sharded optimizer was asked for where there can be none.
    """
    stages = layout.stages if isinstance(layout, StagedLayout) else () if layout is None else (layout,)
    if any(stage.deepest > 1 for stage in stages):
        raise InputError(
            "sharded_optimizer=True needs replicas of one rank each, and this layout has larger ones: give replicas of one "
            "processor, or no layout, or leave sharded_optimizer out"
        )


def _refuse_asked_stages(*, sample: Any, random: RandomDraws, batch_norm: str) -> None:
    """
    Raises:
        InputError: stages were asked for where there can be none.
    """
    for is_so, why in (
        (
            sample is None,
            "need a sample: give tatami.tile sample=..., what the network is called with, for two samples or more",
        ),
        (random != "plain", "draw what one machine draws: leave random='local' out"),
        (batch_norm != "global", "take the statistics of the global batch: leave batch_norm='local' out"),
    ):
        if is_so:
            raise InputError(f"pipeline stages {why}")


def _recorded(
    whole: nn.Module, found: Blocks, sample: Any, *, random: RandomDraws, is_needed: bool, fewest: int
) -> RecordedNetwork | None:
    """The network as pieces that stages can share out; None where it cannot be divided, and need not be."""
    try:
        network = exact_pieces(whole, found, sample, random=random)
        network.refuse_few(fewest)
        return network
    except ModelError:
        if is_needed:
            raise
        return None


@contextmanager
def _setting_up(comm: AbstractCommunicator) -> Iterator[None]:
    """Ranks wait longer for each other than in a step: each traces and tests the network by itself, some more slowly."""
    limit_s = comm.timeout_s
    comm.timeout_s = max(limit_s, SETUP_TIMEOUT_S)
    try:
        with fail_together(comm):
            yield
    except CommTimeoutError as error:
        raise CommTimeoutError(
            f"tatami.tile: rank {comm.rank} has set up the network and waited for the others, which trace and test it by "
            f"themselves: {error} A rank that is still at work is slow, or its machine is busy or short of memory"
        ) from error
    finally:
        comm.timeout_s = limit_s


def _plain(model: nn.Module | Callable[[], nn.Module], comm: AbstractCommunicator) -> nn.Module:
    """The network that was given, or made by the function that was given."""
    given = type(model).__name__
    if isinstance(comm, AbstractCommunicator) and callable(model) and not isinstance(model, nn.Module):
        model = model()
        given = f"a function that returns {type(model).__name__}"
    if isinstance(model, TiledModel):
        raise InputError("this model is tiled already: give the plain network, or lay it out again with tatami.train.move")
    if not isinstance(model, nn.Module) or not isinstance(comm, AbstractCommunicator):
        raise InputError(
            "tatami.tile(network, comm, ...) takes a torch.nn.Module and what tatami.init() returned, not "
            f"{given} and {type(comm).__name__}"
        )
    if next(model.parameters(), None) is None:
        raise InputError(f"this {type(model).__name__} has no parameters: there is nothing to train on several ranks")
    return model


def _refuse_shared(network: nn.Module) -> None:
    """
    Raises:
        InputError: a network that is tiled has some of its parameters, and not all.
    """
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    for other in models():
        theirs = other.plain_parameters() if isinstance(other, TiledModel) and not other.comm.is_closed else []
        shared = [names[id(each)] for each in theirs if id(each) in names]
        if 0 < len(shared) < max(len(names), len(theirs)):
            raise InputError(
                f"{len(shared)} parameters of this network ({shared[0]}, ...) are those of another one that is tiled already, "
                "and both models would have copies of their own, which are trained apart. Put what shares weights into one "
                "module, and tile that; or tile the shared part by itself, and call one model after the other; or close() the "
                "first"
            )


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


def _renamed(layout: Layout | StagedLayout | None, cluster: Cluster, comm: ElasticCommunicator) -> Layout | StagedLayout | None:
    """The same with a layout; none where it is one for other members."""
    name_of = {each.name: name for each, name in zip(cluster.processors, comm.names, strict=True)}
    if layout is None or not set(layout.processors) <= set(name_of):
        return None
    return layout.renamed(name_of)


def _told(planned: Plan | StagedPlan, cluster: Cluster, cost: AbstractCost | None) -> str:
    """The layout in one line, with the share of the processors' speed, or the time, that it is predicted to take."""
    if isinstance(planned, StagedPlan):
        return _told_stages(planned, cluster)
    shown = in_order(planned.tiling, cluster.by_name).replicas
    replicas = " | ".join(_few([" ".join(_few([tile.processor for tile in replica])) for replica in shown]))
    widths = " + ".join(_few([str(replica[0].samples.size) for replica in shown]))
    left_out = f"; left out: {', '.join(planned.left_out)}" if planned.left_out else ""
    again = planned.layout.recomputes
    rounded = f"; recomputing activations: {', '.join(_few(again))}" if again else ""
    rounded += f"; sums travel as {planned.workload.wire}" if planned.workload.wire is not None else ""
    shared = len(planned.layout.processors) + len(planned.left_out) > 1
    is_known = shared and not ignores_messages(cluster, cost=cost)
    efficiency = f"; predicted efficiency {1 / (1 + planned.gap):.0%}" if is_known else ""
    return (
        f"tatami: {planned.planner} lays {planned.tiling.samples} samples x {planned.tiling.units} units as [{replicas}], "
        f"samples {widths}{efficiency}{left_out}{rounded}"
    )


def _told_stages(planned: StagedPlan, cluster: Cluster) -> str:
    layout = planned.layout
    idle = [each.name for each in cluster.processors if each.name not in layout.processors]
    left_out = f"; left out: {', '.join(_few(idle))}" if idle else ""
    ends = (*layout.cuts, len(planned.workload.pieces))
    sizes = [stop - first for first, stop in zip((0, *layout.cuts), ends, strict=True)]
    pieces = " + ".join(_few([*map(str, sizes)]))
    ranks = [["+".join(_few(replica.processors)) for replica in stage.replicas] for stage in layout.stages]
    stages = " > ".join(_few([" ".join(_few(each)) for each in ranks]))
    batches = sorted({replica.micro_batches for replica in layout.stages[0].replicas})
    time = format_duration(planned.predicted_s, digits=3)
    predicted = f"; predicted {time} an iteration" if planned.is_measured else ""  # of relative speeds
    rounded = f"; sums and hand-overs travel as {planned.workload.wire}" if planned.workload.wire is not None else ""
    rounded += f"; recomputing activations: {', '.join(_few(layout.recomputes))}" if layout.recomputes else ""
    return (
        f"tatami: {len(layout.stages)} pipeline stages of {layout.num_replicas} "
        f"{'replica' if layout.num_replicas == 1 else 'replicas'} lie as [{stages}], pieces {pieces}, "
        f"in {' or '.join(map(str, batches))} micro-batches{predicted}{left_out}{rounded}"
    )


def _few(words: Sequence[str]) -> Sequence[str]:
    """The first and the last of many."""
    return words if len(words) <= _SHOWN else [*words[: _SHOWN - 2], "...", words[-1]]
