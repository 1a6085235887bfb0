"""The simulator against what it simulates, in labs on this machine:  python benchmarks/simulated.py [OPTIONS]

    --bandwidth 100Mbit/s        only labs with these links; 1 Gbit/s and 100 Mbit/s by default
    --report                     measure nothing; simulate again what was measured before, and compare
    --part server                only rounds of the parameter server; what was measured before is kept for the rest

In a lab of four unequal hosts, ranks first probe it: speeds and startups of tiles alone, links, messages without a pause. Then
they measure 11 tilings and 5 sizes of 3 all-reduces, which are simulated with the constants of the probe. In a lab of equal
hosts that are nodes of Ray, rounds of the parameter server are measured, for several numbers of workers and servers. Needs
Linux and root (docs/lab.md), SimGrid (docs/rehearsal.md), and a machine with nothing else to do: some 15 minutes on 2 cores.
Writes `benchmarks/results/simulated.jsonl`: a line for each case with `measured_s`, `simulated_s` and `error`, and one for
each kind of case with its errors; and `simulated-found.json`, what was found.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from elsewhere import of_ranks
from ray_nodes import address_of, drive, ray_cluster
from rehearsal.calibrated import calibrated
from rehearsal.goals import errors_against_goals
from rehearsal.server import ServerJob, server_job_from_dict, setup_of
from rehearsal.setting import RankJob
from tatami.bench.interleaved import machine
from tatami.errors import LabError
from tatami.lab import Lab
from tatami.sim.allreduce import Case, replay
from tatami.sim.platforms import ClusterPlatform
from tatami.sim.processes import Runs
from tatami.sim.server import simulate_server
from tatami.sim.tiling import TilingJob, rehearse
from tatami.tiling import Layout
from tatami.units import parse_bandwidth
from tatami.workload import net_workload

RESULTS = Path(__file__).parent / "results"
BANDWIDTHS = ("1 Gbit/s", "100 Mbit/s")
PARTS = ("ranks", "server")
_RANK = "rehearsal.rank"
_SERVER_HOST = "rehearsal.server_host"
_STORE_BYTES = 1 << 30
_ITERATIONS = 4
"""Of which the last counts: ranks begin the first together, and the others one after the other."""


def measure(job: RankJob, *, timeout_s: float = 900.0) -> dict[str, Any]:
    """What the ranks of one lab find."""
    with tempfile.TemporaryDirectory(prefix="tatami-simulated-") as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="latency is not emulated")  # it is probed
        description, found = Path(folder) / "job.json", Path(folder) / "found.json"
        description.write_text(json.dumps(job.to_dict()), encoding="utf-8")
        with Lab(job.cluster) as lab:
            code = lab.run(["-m", _RANK, str(description), str(found)], environment=of_ranks(), timeout_s=timeout_s)
        if code != 0:
            raise LabError(f"the ranks ended with exit code {code}; what they said is above")
        return {"part": "ranks", "job": job.to_dict(), "machine": machine(), **json.loads(found.read_text(encoding="utf-8"))}


def measure_server(job: ServerJob, *, timeout_s: float = 600.0) -> dict[str, Any]:
    """What the driver finds on the nodes of Ray of one lab."""
    with tempfile.TemporaryDirectory(prefix="tatami-") as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="latency is not emulated")  # it is measured
        description, found = Path(folder) / "job.json", Path(folder) / "found.json"
        description.write_text(json.dumps(job.to_dict()), encoding="utf-8")
        with Lab(job.cluster) as lab, ray_cluster(lab, folder=Path(folder), store_bytes=_STORE_BYTES) as log:
            words = [sys.executable, "-m", _SERVER_HOST, address_of(lab), str(description), str(found)]
            drive(lab, words, log=log, timeout_s=timeout_s)
        return {"part": "server", "job": job.to_dict(), "machine": machine(), **json.loads(found.read_text(encoding="utf-8"))}


def compare_server(found: Mapping[str, Any], runs: Runs) -> Iterator[dict[str, Any]]:
    """A record for each case of one lab."""
    job = server_job_from_dict(found["job"])
    setups = [setup_of(found, case, job) for case in found["cases"]]
    for case, setup, (run,) in zip(found["cases"], setups, simulate_server(setups, seeds=[0], runs=runs), strict=True):
        name = f"{len(setup.workers)} workers, {len(setup.servers)} servers"
        where = {"bandwidth_bytes_per_s": job.bandwidth_bytes_per_s, "case": name}
        yield _record("server round", where, statistics.median(case["round_s"]), run.undisturbed_s / run.rounds)


def compare(found: Mapping[str, Any], runs: Runs) -> Iterator[dict[str, Any]]:
    """A record for each case of one lab: measured, simulated, and the relative error."""
    job = found["job"]
    workload = net_workload(job["net"], samples=job["samples"])
    constants = calibrated(found, workload=workload)
    platform = ClusterPlatform(cluster=constants.cluster)
    lab = {"bandwidth_bytes_per_s": job["bandwidth_bytes_per_s"]}
    tilings = [
        TilingJob(
            platform=platform,
            cluster=constants.cluster,
            workload=workload,
            iterations=_ITERATIONS,
            layout=Layout.from_json(json.dumps(each["layout"])),
            startup=constants.startup,
            software=constants.busy,
        )
        for each in found["tilings"]
    ]
    for each, run in zip(found["tilings"], runs.map(rehearse, tilings), strict=True):
        yield _record("tiling", lab | {"case": each["tiling"]}, each["median_s"], run.iteration_s[-1])
    cases = [
        Case(
            algorithm=each["algorithm"],
            ranks=constants.cluster.size,
            size_bytes=each["size_bytes"],
            software=constants.software,
        ).job(platform)
        for each in found["allreduce"]
    ]
    for each, replayed in zip(found["allreduce"], runs.map(replay, cases), strict=True):
        case = {"case": each["algorithm"], "size_bytes": each["size_bytes"]}
        # The mean: where long messages wait for each other in some runs, the median is of the one kind or of the other.
        # And each run follows another, after whose last message a rank needs its time, as after every one.
        yield _record("allreduce", lab | case, each["mean_s"], replayed.total_s + constants.software.gap_s)


def _record(what: str, case: Mapping[str, Any], measured_s: float, simulated_s: float) -> dict[str, Any]:
    error = simulated_s / measured_s - 1
    return {"what": what, **case, "measured_s": measured_s, "simulated_s": simulated_s, "error": error}


def summary(records: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The median, the 95th percentile and the largest error of each kind of case in each lab, and of all together."""
    kinds = dict.fromkeys((each["what"], each["bandwidth_bytes_per_s"]) for each in records)
    for what, bandwidth in kinds:
        of_kind = [each for each in records if (each["what"], each["bandwidth_bytes_per_s"]) == (what, bandwidth)]
        yield {"what": f"errors of {what}", "bandwidth_bytes_per_s": bandwidth, **_errors(of_kind)}
    yield {"what": "errors of all", **_errors(records)}


def _errors(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"cases": len(records), **errors_against_goals([each["error"] for each in records])}


def main() -> None:
    """Measure, simulate, compare."""
    options = _options()
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / "simulated-found.json"
    if not options.report:
        rates = [parse_bandwidth(bandwidth) for bandwidth in options.bandwidth]
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        found = [lab for lab in found if lab["part"] not in options.part]
        try:
            if "ranks" in options.part:
                found += [measure(RankJob(bandwidth_bytes_per_s=rate)) for rate in rates]
            if "server" in options.part:
                found += [measure_server(ServerJob(bandwidth_bytes_per_s=rate)) for rate in rates]
        except LabError as error:
            sys.exit(f"simulated: {error}")
        path.write_text(json.dumps(found), encoding="utf-8")
    elif not path.exists():
        sys.exit(f"simulated: nothing has been measured yet: there is no {path}")
    labs = json.loads(path.read_text(encoding="utf-8"))
    with Runs() as runs:
        records = [
            {**record, "machine": lab["machine"]}
            for lab in labs
            for record in (compare if lab["part"] == "ranks" else compare_server)(lab, runs)
        ]
    lines = [json.dumps(each) for each in [*records, *summary(records)]]
    (options.results / "simulated.jsonl").write_text("\n".join([*lines, ""]), encoding="utf-8")
    for each in [*records, *summary(records)]:
        print(json.dumps({name: value for name, value in each.items() if name != "machine"}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", action="append", help="of all links; may be given several times")
    parser.add_argument("--part", action="append", choices=PARTS, help="what is measured; all by default")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder for the records")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    options.bandwidth = options.bandwidth or BANDWIDTHS
    options.part = options.part or PARTS
    return options


if __name__ == "__main__":
    main()
