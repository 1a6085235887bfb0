"""`tatami plan` and `tatami simulate tiling` on tilings that nothing was fitted on:  python benchmarks/heldout.py [OPTIONS]

    --json                       print the records as JSON lines
    --tilings 2 --beds 1         only so many of each, to see that it works
    --paced 45e9                 hosts that last, of which one of speed 1 computes so many flop/s, in place of parts of a core
    --report                     measure nothing; predict again what was measured before

In each of eight labs (other networks, speeds, numbers of hosts and links) the ranks probe what there is, as `tatami probe`
does, and then measure eight tilings drawn with a seed: any replicas in any order, heights and widths near what the speeds ask
for. The probe is all that predictions know. Needs Linux and root (docs/lab.md), SimGrid (docs/rehearsal.md), and a machine
with nothing else to do. Writes `benchmarks/results/heldout.jsonl`, or `heldout-paced.jsonl`: a line for each tiling with
`measured_s`, its spread, `planned_s`, `simulated_s` and their errors, and lines that say whether the goals hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from elsewhere import of_ranks
from rehearsal.goals import errors_against_goals, inside_expected_range
from rehearsal.heldout import BEDS, HeldOutBed
from tatami.bench.interleaved import machine
from tatami.cluster import Cluster, read_cluster
from tatami.errors import LabError
from tatami.lab import Lab
from tatami.sim.platforms import ClusterPlatform
from tatami.sim.processes import Runs
from tatami.sim.tiling import TilingJob, rehearse
from tatami.tiling import AlphaBetaCost, Layout
from tatami.tiling.expected_range import expected_range_s
from tatami.workload import as_probed, net_workload

RESULTS = Path(__file__).parent / "results"
_ITERATIONS = 4
"""Of which the last counts: ranks begin the first together, and the others one after the other."""


def measure(bed: HeldOutBed, *, timeout_s: float = 1800.0) -> dict[str, Any]:
    """What the ranks of one lab find."""
    with tempfile.TemporaryDirectory(prefix="tatami-heldout-") as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="latency is not emulated")  # it is probed
        description, found = Path(folder) / "bed.json", Path(folder) / "found.json"
        description.write_text(json.dumps(bed.to_dict()), encoding="utf-8")
        with Lab(bed.cluster, paced=bed.flop_per_s is not None, dilation=bed.dilation) as lab:
            words = ["-m", "rehearsal.heldout", str(description), str(found)]
            code = lab.run(words, environment=of_ranks(), timeout_s=timeout_s)
        if code != 0:
            raise LabError(f"the ranks ended with exit code {code}; what they said is above")
        return {"bed": bed.to_dict(), "machine": machine(), **json.loads(found.read_text(encoding="utf-8"))}


def judged(lab: Mapping[str, Any], runs: Runs) -> Iterator[dict[str, Any]]:
    """A record for each tiling of one lab: measured, planned and simulated."""
    bed = lab["bed"]
    with tempfile.TemporaryDirectory(prefix="tatami-heldout-") as folder:
        file = Path(folder) / "cluster.toml"
        file.write_text(lab["cluster"], encoding="utf-8")
        cluster: Cluster = read_cluster(file)
    workload = replace(as_probed(net_workload(bed["net"], samples=bed["samples"]), cluster), overlaps_sums=True)
    layouts = [Layout.from_json(json.dumps(each["layout"])) for each in lab["tilings"]]
    platform = ClusterPlatform(cluster=cluster)
    jobs = [
        TilingJob(platform=platform, cluster=cluster, workload=workload, layout=layout, iterations=_ITERATIONS)
        for layout in layouts
    ]
    for each, layout, run in zip(lab["tilings"], layouts, runs.map(rehearse, jobs), strict=True):
        measured_s = median(each["rounds_s"])
        planned = AlphaBetaCost().price(layout, cluster=cluster, workload=workload)
        processors = [cluster.by_name[name] for name in layout.processors]
        yield {
            "what": "held-out tiling",
            "bed": bed["name"],
            "net": bed["net"],
            "samples": bed["samples"],
            "replicas": [len(replica.processors) for replica in layout.replicas],
            "measured_s": measured_s,
            "spread": (max(each["rounds_s"]) - min(each["rounds_s"])) / measured_s,
            "planned_s": planned.total,
            "planned_error": planned.total / measured_s - 1,
            "range_s": expected_range_s(planned.total, compute_s=planned.compute, processors=processors),
            "simulated_s": run.iteration_s[-1],
            "simulated_error": run.iteration_s[-1] / measured_s - 1,
        }


def summary(records: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Whether predictions hold what is asked of them."""
    for way in ("planned", "simulated"):
        errors = [each[f"{way}_error"] for each in records]
        yield {"what": f"errors of {way} times", "tilings": len(errors), **errors_against_goals(errors)}
    yield {**inside_expected_range(records), "tilings": len(records)}


def main() -> None:
    """Measure, predict, judge."""
    options = _options()
    options.results.mkdir(parents=True, exist_ok=True)
    name = "heldout" if options.paced is None else "heldout-paced"
    path = options.results / f"{name}-found.json"
    if not options.report:
        beds = [bed.with_tilings(options.tilings, flop_per_s=options.paced) for bed in BEDS[: options.beds]]
        try:
            path.write_text(json.dumps([measure(bed) for bed in beds]), encoding="utf-8")
        except LabError as error:
            sys.exit(f"heldout: {error}")
    elif not path.exists():
        sys.exit(f"heldout: nothing has been measured yet: there is no {path}")
    labs = json.loads(path.read_text(encoding="utf-8"))
    with Runs() as runs:
        records = [{**record, "machine": lab["machine"]} for lab in labs for record in judged(lab, runs)]
    lines = [*records, *summary(records)]
    (options.results / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
    for each in lines:
        shown = {name: value for name, value in each.items() if name != "machine"}
        print(json.dumps(shown) if options.json else _told(shown))


def _told(record: Mapping[str, Any]) -> str:
    if "got" in record:
        shares = record["got"] if isinstance(record["got"], dict) else {"share": record["got"]}
        got = ", ".join(f"{name} {100 * value:.1f} %" for name, value in shares.items())
        return f"{record['what']}: {got} of {record['tilings']} tilings; {'holds' if record['holds'] else 'does not hold'}"
    replicas = "+".join(map(str, record["replicas"]))
    return (
        f"{record['bed']:12} {replicas:14} {1e3 * record['measured_s']:8.1f} ms ±{100 * record['spread']:.0f} %, "
        f"planned {100 * record['planned_error']:+.1f} %, simulated {100 * record['simulated_error']:+.1f} %"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--beds", type=int, default=len(BEDS), help="how many labs")
    parser.add_argument("--tilings", type=int, default=8, help="how many in each lab")
    parser.add_argument("--paced", type=float, help="flop/s of a host of speed 1, in paced labs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder for the records")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
