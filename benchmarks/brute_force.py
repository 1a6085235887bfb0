"""Plans of the default planner against all others that there are:  python benchmarks/brute_force.py [--cases 500]

Random clusters of two to five processors and small networks. Every subset of the processors is divided into replicas in every
way, each replica in two orders, its tiles balanced, in as few micro-batches as memory allows or squeezed into it, and priced.
The regret of a plan is by how much its predicted time is above the least of these. The second part has the named planners side
by side, of which none may be predicted faster than the default. Writes benchmarks/results/brute-force.jsonl: the command and
the machine, a line for each part, and one for each case of the first. `--cases 0` or `--named 0` leaves out a part.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

from tatami.bench.interleaved import machine
from tatami.cluster import Cluster, Link, Processor
from tatami.errors import MemoryLackError
from tatami.tiling import DEFAULT_PLANNER, AlphaBetaCost, Layout, compare, plan
from tatami.tiling.memory import memory_bytes
from tatami.tiling.room import with_room
from tatami.tiling.timed import balanced
from tatami.tiling.weighted import data_parallel
from tatami.workload import Workload, gpt_workload, net_workload

RESULTS = Path(__file__).parent / "results" / "brute-force.jsonl"


def a_case(seed: int, *, most: int = 5) -> tuple[Cluster, Workload, AlphaBetaCost]:
    """Two to `most` processors, 60 % of the clusters in flop/s, half with measured messages, 40 % with memory."""
    chance = random.Random(seed)
    workload = _network(chance)
    count = chance.randint(2, most)
    hosts = chance.randint(1, count)
    flop_per_s = 10 ** chance.uniform(8.5, 12)
    is_measured, has_memory, is_relative = chance.random() < 0.5, chance.random() < 0.4, chance.random() >= 0.6
    whole = _whole_bytes(workload)
    scale = 1.0 if is_relative else flop_per_s
    processors = tuple(
        Processor(
            name=f"p{number}",
            speed=chance.uniform(0.1, 1.0) * scale,
            host=f"h{number if number < hosts else chance.randrange(hosts)}",
            message_s=10 ** chance.uniform(-5.5, -2.5) if is_measured else 0.0,
            call_s=10 ** chance.uniform(-5, -3) if is_measured else 0.0,
            step_s=10 ** chance.uniform(-5, -2.5) if is_measured else 0.0,
            memory_bytes=round(whole * 10 ** chance.uniform(-0.8, 0.3)) if has_memory and chance.random() < 0.8 else None,
        )
        for number in range(count)
    )
    names = sorted({each.host for each in processors})
    links = {pair: _link(chance) for pair in combinations(names, 2) if chance.random() < 0.3}
    cluster = Cluster(processors=processors, network=_link(chance), links=links)
    return cluster, workload, AlphaBetaCost(flop_per_s=flop_per_s if is_relative else None)


def _network(chance: random.Random) -> Workload:
    if chance.random() < 0.5:
        heads = chance.choice([4, 6, 12])
        layers, tokens = chance.randint(1, 3), chance.choice([32, 128])
        return gpt_workload(
            layers=layers, width=16 * heads, heads=heads, tokens=tokens, samples=chance.choice([8, 32, 64]), vocabulary=256
        )
    sizes = [chance.choice([64, 203, 512]) for _ in range(chance.randint(2, 6) + 1)]
    return net_workload("-".join(map(str, sizes)), samples=chance.choice([64, 512, 4096]))


def _link(chance: random.Random) -> Link:
    return Link(bandwidth_bytes_per_s=10 ** chance.uniform(6.5, 9.5), latency_s=10 ** chance.uniform(-5, -2.3))


def _whole_bytes(workload: Workload) -> float:
    alone = data_parallel([Processor(name="p", speed=1.0)])
    return memory_bytes(alone, workload=workload)["p"]


def set_partitions(members: Sequence[Processor]) -> Iterator[list[list[Processor]]]:
    """All ways to divide `members` into replicas."""
    if not members:
        yield []
        return
    first, rest = members[0], members[1:]
    for parts in set_partitions(rest):
        yield [[first], *parts]
        for index in range(len(parts)):
            yield [*parts[:index], [first, *parts[index]], *parts[index + 1 :]]


def layouts(members: Sequence[Processor], workload: Workload) -> Iterator[Layout]:
    """All replicas, each in ascending and in descending order of speed."""
    for parts in set_partitions(members):
        if not workload.blocks and len(parts) < len(members):
            continue
        ordered = [sorted(part, key=lambda each: each.speed) for part in parts]
        flipped = [part[::-1] for part in ordered]
        for replicas in [ordered, flipped] if len(parts) < len(members) else [ordered]:
            layout = balanced(replicas, workload=workload) if workload.blocks else data_parallel(members)
            if layout is not None:
                yield layout


def least_s(cluster: Cluster, workload: Workload, cost: AlphaBetaCost) -> tuple[float, Layout | None]:
    """The least predicted time of any layout, the run being one of its processors alone."""
    best: tuple[float, Layout | None] = (float("inf"), None)
    for size in range(1, cluster.size + 1):
        for members in combinations(cluster.processors, size):
            own = cluster.only([each.name for each in members])
            scale = AlphaBetaCost(flop_per_s=cost.scale(cluster))
            for layout in layouts(members, workload):
                if scale.at_least(layout, cluster=own, workload=workload) >= best[0]:
                    continue
                held = with_room(layout, cluster=own, workload=workload, cost=scale)
                if held is None or held.empty(workload):
                    continue
                price = scale.price(held, cluster=own, workload=workload).total
                if price < best[0]:
                    best = (price, held)
    return best


def regret_of(seed: int) -> dict[str, object]:
    """One case: the regret of the plan, None where nothing can be compared."""
    cluster, workload, cost = a_case(seed)
    brute_s, layout = least_s(cluster, workload, cost)
    line: dict[str, object] = {"seed": seed, "processors": cluster.size, "brute_s": brute_s if layout else None}
    began_s = time.process_time()
    try:
        found = plan(cluster=cluster, workload=workload, cost=cost)
    except MemoryLackError:
        return {**line, "planned_s": None, "regret": None if layout is None else float("inf")}
    line |= {"planned_s": found.predicted_s, "cpu_s": time.process_time() - began_s, "left_out": list(found.left_out)}
    line["regret"] = found.predicted_s / brute_s - 1 if layout else None
    line["memory"] = cluster.memory_known
    line["brute"] = [[*replica.processors, replica.micro_batches] for replica in layout.replicas] if layout else None
    line["replicas"] = [[*replica.processors, replica.micro_batches] for replica in found.layout.replicas]
    return line


def better_named(seed: int) -> str | None:
    """A planner that is predicted faster than the default, if there is one."""
    cluster, workload, cost = a_case(seed, most=8)
    try:
        plans = compare(cluster=cluster, workload=workload, cost=cost)
    except MemoryLackError:
        return None
    best = min(plans, key=lambda each: each.predicted_s)
    default = [each for each in plans if each.planner == DEFAULT_PLANNER]
    if default and default[0].predicted_s <= best.predicted_s * (1 + 1e-9):
        return None
    return best.planner


def summary(regrets: Sequence[float]) -> dict[str, float]:
    """Quantiles of the regrets."""
    listed = sorted(regrets)
    return {
        "cases": len(listed),
        "median": statistics.median(listed),
        "p95": listed[min(len(listed) - 1, int(0.95 * len(listed)))],
        "worst": listed[-1],
        "below_0.1_percent": sum(each < 1e-3 for each in listed) / len(listed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500, help="compared with brute force")
    parser.add_argument("--named", type=int, default=2000, help="compared with the named planners")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next cases have the next seeds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # who is left out
    lines = []
    regrets: list[float] = []
    seed = args.seed
    while len(regrets) < args.cases:
        line = regret_of(seed)
        seed += 1
        lines.append(line)
        if isinstance(line["regret"], float):
            regrets.append(line["regret"])
    parts: list[dict[str, object]] = []
    if regrets:
        refused = sum(line["regret"] is None for line in lines)
        parts.append({"part": "brute force", **summary(regrets), "refused_both": refused})
    if args.named:
        better = {seed: name for seed in range(args.seed, args.seed + args.named) if (name := better_named(seed))}
        parts.append({"part": "named planners", "cases": args.named, "better": better})
    for part in parts:
        print(json.dumps(part), flush=True)
    head = {"command": shlex.join(["python", *sys.argv]), "machine": machine()}
    args.out.write_text("".join(json.dumps(line) + "\n" for line in (head, *parts, *lines)), encoding="utf-8")


if __name__ == "__main__":
    main()
