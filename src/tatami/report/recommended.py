"""A plan for people: what it is in words, where its time goes, what keeps it from the ideal, and what it is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tatami.cluster import Cluster, Link
from tatami.report.machines import display_names
from tatami.report.tables import Table, table_of
from tatami.report.words import percent, wrapped
from tatami.tiling import DEFAULT_PLANNER, Obstacle, Plan, PlanLimits, SlowestLink, StagedPlan
from tatami.tiling.alphabeta import FLOP_PER_S
from tatami.tiling.left_out import Reason
from tatami.tiling.memory import memory_bytes
from tatami.units import format_bandwidth, format_duration, format_size, format_speed

_MOST_NAMED = 4
_MOST_IDLE = 8
"""Names of machines in a sentence."""
_WIDEST_LABEL = 30
"""Characters of what a plan is called; more are several lines, so that tables fit into a terminal of 80."""
_NO_FASTER = "no plan that gives them work was predicted to be faster"
_LEAST_PART = 0.01


def recommendation(
    plan: Plan, *, cluster: Cluster, width: int, with_idle_s: float | None = None, is_asked: bool = False
) -> str:
    """The recommended plan in words, and who has no part in it, in lines of at most `width` characters.

    Args:
        plan: priced as a run of those that have work.
        with_idle_s: seconds of an iteration where the others are started, too; said where they are clearly more.
        is_asked: whether it is what was asked for, and no recommendation.
    """
    words = plan_words(plan, cluster=cluster)
    idle = without_work(plan.layout.processors, cluster=cluster, reasons=plan.reasons)
    if with_idle_s is not None and with_idle_s > plan.predicted_s * (1 + _LEAST_LOST):
        are_one = cluster.size - len(plan.layout.processors) == 1
        them = "it: as a rank without work it hears" if are_one else "them: as ranks without work they hear"
        idle += (
            f" Start the run without {them} the gradients of weights that every rank has, and an iteration takes "
            f"{seconds_words(with_idle_s)}."
        )
    layout, times = plan.layout, plan.workload.passes(recomputes=True)
    otherwise = memory_bytes(layout.keeping, workload=plan.workload, cluster=cluster.only(layout.processors))
    again = recomputing_words(plan, otherwise, times=times, cluster=cluster)
    return wrapped(f"{'As asked' if is_asked else 'Recommended'}: {words}.{again}{idle}", width=width)


def recomputing_words(plan: Plan | StagedPlan, otherwise: Mapping[str, float], *, times: float, cluster: Cluster) -> str:
    """A sentence that says which machines recompute activations, and what that costs and saves; empty where none does.

    Args:
        otherwise: what each processor would keep, in bytes, if none recomputed.
        times: how often they compute their work.
    """
    names = plan.layout.recomputes
    if not names:
        return ""
    sizes = []
    for found in (plan.memory_bytes, otherwise):
        least, most = (format_size(round(choose(found[name] for name in names)), digits=3) for choose in (min, max))
        sizes.append(least if least == most else f"{least} to {most}")
    who = listed_machines(names, cluster=cluster)
    verb = "recomputes its" if len(names) == 1 else "recompute their"
    return f" To save memory, {who} {verb} activations: {times:.2g} x the work, {sizes[0]} in place of {sizes[1]}."


def without_work(placed: Sequence[str], *, cluster: Cluster, reasons: Mapping[str, Reason] | None = None) -> str:
    """A sentence that names those of the cluster that are not `placed`, and why (`reasons`, or that no plan with them was
    predicted to be faster); empty where there is none."""
    names, known = display_names(cluster), set(placed)
    idle: dict[str, list[str]] = {}
    for each in cluster.processors:
        if each.name not in known:
            reason = None if reasons is None else reasons.get(each.name)
            why = _NO_FASTER if reasons is None else "" if reason is None else reason.value
            idle.setdefault(why and f" ({why})", []).append(names[each.name])
    listed = "; ".join(f"{_listed(own)}{reason}" for reason, own in idle.items())
    return f" Without work: {listed}." if idle else ""


def time_words(plan: Plan, *, cluster: Cluster, found: PlanLimits, is_measured: bool, width: int) -> str:
    """The time of an iteration, where it goes, and what keeps it from the ideal, in lines of at most `width` characters.

    Args:
        found: its limits.
        is_measured: speeds are flop/s, so that seconds are more than a guess.
    """
    cost = plan.predicted
    sums = "tensor-parallel sums" if plan.layout.deepest > 1 else "sums of batch normalization"
    parts = {"computing": cost.compute, sums: cost.tensor_parallel, "gradient sums": cost.gradients}
    shown = [f"{what} {seconds_words(own)} ({_part(own / cost.total)})" for what, own in parts.items() if own]
    between = range_words(plan.range_s, is_measured=is_measured)
    text = f"An iteration takes {seconds_words(cost.total)}{between}: {', '.join(shown)}."
    all_ = {1: "the machine", 2: "both machines"}.get(cluster.size, f"all {cluster.size:,} machines")
    text += f" Without communication and waiting, {all_} would take {seconds_words(found.ideal_s)}."
    lost = list(obstacles(plan, cluster=cluster, found=found))
    text += " The difference is due to:" if lost else ""
    lines = [wrapped(text, width=width)]
    most = max((len(seconds_words(seconds)) for _, seconds in lost), default=0)
    for what, seconds in lost:
        lines.append(wrapped(f"  {seconds_words(seconds):>{most}}  {what}", width=width, indent=" " * (most + 4)))
    if not is_measured:
        lines.append(guess_words(width=width))
    return "\n".join(lines)


def range_words(range_s: tuple[float, float], *, is_measured: bool) -> str:
    """The range in which nine of ten iterations are expected, in brackets; nothing where the time itself is a guess."""
    low, high = map(seconds_words, range_s)
    return f" ({low} to {high} in nine of ten cases)" if is_measured else ""


def guess_words(*, width: int) -> str:
    """What relative speeds say of seconds, in lines of at most `width` characters."""
    guess = (
        f"Speeds are relative, and 1 is assumed to be {format_speed(FLOP_PER_S)}: times and costs of sending are guesses. "
        "Measure speeds with `tatami probe`, or give them in flop/s."
    )
    return wrapped(guess, width=width)


def plan_table(
    *,
    plans: Sequence[Plan],
    best: Plan | StagedPlan,
    weighted: Plan | None,
    alone: Plan | None,
    cluster: Cluster,
    staged: StagedPlan | None = None,
    network: str | None = None,
    is_asked: bool = False,
) -> Table:
    """One machine alone, weighted data parallelism, the recommended plan, those of other planners, and pipeline stages.

    Plans that are the same are one row.

    Args:
        plans: of the planners, the best one among them.
        best: the recommended one.
        weighted, alone: None where memory does not allow it.
        staged: the best plan with stages; None where there is none.
        network: what it is called in the title.
        is_asked: whether the best one is what was asked for, and no recommendation.
    """
    chosen = "as asked" if is_asked else "recommended"
    alone_words = "one machine alone" if alone is None else f"{display_names(cluster)[alone.layout.processors[0]]} alone"
    candidates = [(alone_words, alone), ("weighted data parallelism", weighted)]
    candidates += [(chosen, best)] if isinstance(best, Plan) else []
    words_of = {DEFAULT_PLANNER: "without stages"} if staged is best and len(plans) == 1 else {}  # its name was not asked for
    candidates += [(words_of.get(plan.planner, plan.planner), plan) for plan in plans if plan not in (best, weighted)]
    rows: list[tuple[Plan | StagedPlan | None, list[str]]] = []
    if staged is not None:
        rows.append((staged, [chosen, "pipeline stages"] if staged is best else ["pipeline stages"]))
    for words, plan in candidates:
        same = next((own for other, own in rows if plan and isinstance(other, Plan) and is_same(plan, other)), None)
        if same is None:
            kind = [_kind(plan)] if words == chosen and isinstance(plan, Plan) else []
            rows.append((plan, [words, *kind, *([plan.planner] if plan is best and plan.planner != DEFAULT_PLANNER else [])]))
        elif words not in same:
            same.append(words)
    if staged is not None:
        rows.append(rows.pop(0))
    base = alone or weighted
    cells = [
        {
            "plan": _labels(labels),
            "machines": "-" if plan is None else f"{len(plan.layout.processors):,}",
            "replicas": "-" if plan is None else _replicas(plan),
            "iteration": "no room" if plan is None else seconds_words(plan.predicted_s),
            "speed-up": "-" if plan is None or base is None else f"{base.predicted_s / plan.predicted_s:.2f} x",
        }
        for plan, labels in rows
    ]
    if is_asked:
        row = min((plan.predicted_s, index) for index, (plan, _) in enumerate(rows) if plan is not None)[1]
    else:
        row = next(index for index, (_, labels) in enumerate(rows) if chosen in labels)
    samples = best.workload.samples
    sized = f"{samples:,} sample{'s' if samples > 1 else ''} per iteration"
    title = f"Comparison for {f'{network} and ' if network else ''}{sized}:"
    return table_of(title, cells, texts=("plan",), best=row if len(rows) > 1 else None)


def _kind(plan: Plan) -> str:
    if len(plan.layout.processors) == len(plan.layout.replicas):
        return "data parallelism"
    return "tensor parallelism" if len(plan.layout.replicas) == 1 else "two-dimensional tiles"


def _replicas(plan: Plan | StagedPlan) -> str:
    if isinstance(plan, Plan):
        return f"{len(plan.layout.replicas):,}"
    return f"{plan.layout.num_replicas:,} in {len(plan.layout.stages):,} stages"


def _labels(labels: Sequence[str]) -> str:
    """What the plan is in a line of its own, and the planners that found it below."""
    known = [each for each in labels if " " in each or each == "recommended"]
    planners = [each for each in labels if each not in known]
    found_by = f"planner{'s' if len(planners) > 1 else ''} {', '.join(planners)}"
    below = [f"({found_by})" if known else found_by] if planners else []
    words = ", ".join(known)
    lines = [words] if len(words) <= _WIDEST_LABEL else [f"{each}," for each in known[:-1]] + known[-1:]
    return "\n".join([*(lines if known else []), *below])


def is_same(one: Plan, other: Plan) -> bool:
    """Whether two plans give the same shares to the same machines."""
    if one is other:
        return True
    shares = [
        {
            tile.processor: (tile.samples.size, tile.units.size, own.micro_batches, own.recomputes)
            for own, replica in zip(plan.layout.replicas, plan.tiling.replicas, strict=True)
            for tile in replica
        }
        for plan in (one, other)
    ]
    replicas = [sorted(sorted(replica.processors) for replica in plan.layout.replicas) for plan in (one, other)]
    return shares[0] == shares[1] and replicas[0] == replicas[1]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _MOST_IDLE else f"{', '.join(names[:2])} and {len(names) - 2} more"


def plan_words(plan: Plan, *, cluster: Cluster) -> str:
    """What a plan is, in a sentence."""
    replicas = plan.layout.replicas
    who = listed_machines(plan.layout.processors, cluster=cluster)
    samples = f"the {plan.workload.samples:,} samples" if plan.workload.samples > 1 else "the sample"
    depths = sorted({len(replica.processors) for replica in replicas})
    if len(plan.layout.processors) == 1:
        words = f"{who} alone" if cluster.size > 1 else f"{who} computes {samples}"
    elif depths == [1]:
        words = f"data parallelism over {who}: each computes a share of {samples}"
    elif len(replicas) == 1:
        words = f"tensor parallelism over {who}: each computes a share of the units, of all {plan.workload.samples:,} samples"
    else:
        each = f"{depths[0]}" if len(depths) == 1 else f"{depths[0]} to {depths[-1]}"
        words = (
            f"{len(replicas):,} replicas of {each} machines, {who}: replicas share {samples}, machines of a replica the units"
        )
    pairs = zip(replicas, plan.tiling.replicas, strict=True)
    parts = sorted({len(own.micro_batch_sizes(replica[0].samples.size)) for own, replica in pairs})
    if parts[-1] > 1:
        words += f", in {parts[0] if len(parts) == 1 else f'{parts[0]} to {parts[-1]}'} micro-batches"
    return words


def listed_machines(placed: Sequence[str], *, cluster: Cluster) -> str:
    """The machines that take part, by name where they are few."""
    names, known = display_names(cluster), set(placed)
    used = [names[each.name] for each in cluster.processors if each.name in known]
    if len(used) == 1:
        return used[0]
    if len(used) <= _MOST_NAMED:
        return f"{', '.join(used[:-1])} and {used[-1]}"
    return f"all {len(used):,} machines" if len(used) == cluster.size else f"{len(used):,} of {cluster.size:,} machines"


def _part(fraction: float) -> str:
    return percent(round(fraction, 2)) if fraction >= _LEAST_PART else f"under {percent(_LEAST_PART)}"


def seconds_words(seconds: float) -> str:
    """For example "12.3 ms"."""
    return format_duration(seconds, digits=3)


_LEAST_LOST = 0.05
"""Smallest part of an iteration that is worth a line."""
_LEAST_REST = 0.1
"""Smallest part of the difference that is worth a line of what is not named."""
_MOST_LINKS = 3
_WORDS = {
    Obstacle.MESSAGES: "CPU time of sending, receiving and copying messages",
    Obstacle.CALLS: "calls, which cost the same for small and large shares",
    Obstacle.SCATTER: "variation of measured speeds: all wait for the slowest",
    Obstacle.RECOMPUTATION: "recomputing activations",
    Obstacle.SHARES: "uneven shares (whole samples and units, memory) and work that replicas repeat",
}


def obstacles(plan: Plan, *, cluster: Cluster, found: PlanLimits) -> Iterator[tuple[str, float]]:
    """The obstacles that take 5 % of an iteration or more, in words and in seconds, the largest first, and the others."""
    difference_s = rest_s = plan.predicted_s - found.ideal_s
    for obstacle, seconds in sorted(found.lost_s.items(), key=lambda pair: -pair[1]):
        if seconds < _LEAST_LOST * plan.predicted_s:
            break
        rest_s -= seconds
        if obstacle is Obstacle.UNUSED:
            number = cluster.size - len(plan.layout.processors)
            yield f"{number} machine{'s' if number > 1 else ''} without work", seconds
        elif obstacle is Obstacle.BANDWIDTH:
            yield f"bytes on {_slowest_link(plan, cluster=cluster, obstacle=obstacle)}", seconds
        elif obstacle is Obstacle.LATENCY:
            yield f"latency of {_slowest_link(plan, cluster=cluster, obstacle=obstacle)}", seconds
        else:
            yield _WORDS[obstacle], seconds
    if _LEAST_REST * difference_s < rest_s < difference_s:
        yield "other", rest_s


def _slowest_link(plan: Plan, *, cluster: Cluster, obstacle: Obstacle) -> str:
    """Which link holds the plan back, and its bandwidth or latency."""
    names = plan.layout.processors
    found = SlowestLink(cluster).among(names)
    is_latency = obstacle is Obstacle.LATENCY
    has = format_duration(found.latency_s, digits=3) if is_latency else format_bandwidth(found.bandwidth_bytes_per_s, digits=3)

    def holds_back(link: Link) -> bool:
        if is_latency:
            return link.latency_s >= found.latency_s
        return link.bandwidth_bytes_per_s <= found.bandwidth_bytes_per_s

    hosts = list(dict.fromkeys(cluster.host_of[name] for name in names))
    if len(hosts) == 1:
        return f"the link inside {hosts[0]} ({has})"
    pairs = [pair for pair, link in cluster.links.items() if holds_back(link) and set(pair) <= set(hosts)]
    slow = [host for host in hosts if host in cluster.own_links and holds_back(cluster.own_links[host])]
    if slow:
        return f"the link of {_listed_links(slow)} ({has})"
    if pairs:
        return f"the link between {_listed_links([' and '.join(pair) for pair in pairs])} ({has})"
    return f"the network between hosts ({has})"


def _listed_links(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _MOST_LINKS else f"{names[0]} and {len(names) - 1} more"
