"""A plan with pipeline stages for people: what it is in words, what each machine does, and where its time goes."""

from __future__ import annotations

from tatami.cluster import Cluster
from tatami.report.machines import MachineLine
from tatami.report.recommended import listed_machines, range_words, recomputing_words, seconds_words, without_work
from tatami.report.words import percent, wrapped
from tatami.tiling import ProcessorTime, StagedPlan
from tatami.tiling.alphabeta import FLOP_PER_S
from tatami.tiling.staged_price import price_stages
from tatami.units import format_speed


def staged_recommendation(plan: StagedPlan, *, cluster: Cluster, width: int, is_asked: bool = False) -> str:
    """The plan in words, and who has no part in it, in lines of at most `width` characters; `is_asked`: for so many stages."""
    layout, samples = plan.layout, plan.workload.samples
    words = f"{len(layout.stages)} pipeline stages over {listed_machines(layout.processors, cluster=cluster)}: each computes "
    words += "consecutive pieces of the network"
    if layout.num_replicas > 1:
        words = f"{layout.num_replicas} replicas of {words}; replicas share the {samples:,} samples"
    numbers = sorted({rank.micro_batches for rank in plan.ranks})
    words += f", in {' to '.join(map(str, numbers))} micro-batch{'es' if numbers[-1] > 1 else ''}"
    again, idle = "", without_work(layout.processors, cluster=cluster)
    if plan.recomputes:
        keeping = price_stages(layout.recomputing(()), cluster=cluster, workload=plan.workload)
        times = max(rank.pass_s / (rank.pass_s - rank.again_s) for rank in plan.ranks)
        again = recomputing_words(plan, keeping.memory_bytes, times=times, cluster=cluster)
    return wrapped(f"{'As asked' if is_asked else 'Recommended'}: {words}.{again}{idle}", width=width)


def staged_lines(plan: StagedPlan) -> tuple[MachineLine, ...]:
    """One line for each machine, stage by stage."""
    return tuple(
        MachineLine(
            time=ProcessorTime(
                processor=rank.processor,
                compute_s=rank.compute_s,
                sums_s=rank.exposed_s,
                gradients_s=rank.gradients_s,
                wait_s=rank.wait_s,
            ),
            replica=rank.replica + 1 if plan.layout.num_replicas > 1 else None,
            samples=rank.samples,
            micro_batches=rank.micro_batches,
            units_fraction=rank.units_fraction,
            memory_bytes=rank.memory_bytes,
            memory_given_bytes=rank.memory_given_bytes,
            stage=rank.stage + 1,
            pieces=piece_words(plan, rank.first, rank.stop),
        )
        for rank in plan.ranks
    )


def piece_words(plan: StagedPlan, first: int, stop: int) -> str:
    """The names of the first and the last of some pieces."""
    names = [piece.name for piece in plan.workload.pieces[first:stop]]
    return names[0] if len(names) == 1 else f"{names[0]} - {names[-1]}"


def staged_time_words(plan: StagedPlan, *, ideal_s: float, cluster: Cluster, width: int) -> str:
    """The time of an iteration, and where it goes, in lines of at most `width` characters."""
    shown = [
        f"{what} {seconds_words(own)} ({percent(round(own / plan.iteration_s, 2))})"
        for what, own in plan.parts_s
        if own >= plan.iteration_s / 200
    ]
    all_ = {2: "both machines"}.get(cluster.size, f"all {cluster.size:,} machines")
    text = (
        f"An iteration takes {seconds_words(plan.iteration_s)}{range_words(plan.range_s, is_measured=plan.is_measured)}: "
        f"{', '.join(shown)}. Without communication and waiting, {all_} "
    )
    text += f"would take {seconds_words(ideal_s)}."
    if not plan.is_measured:
        text += f" Speeds are relative, and 1 is assumed to be {format_speed(FLOP_PER_S)}: times are guesses."
    return wrapped(text, width=width)
