"""Sums of vectors over the hosts of a paced lab, in one piece and in several:  python benchmarks/sums.py [--hosts 4] [--json]

All ways are taken in turn, `--rounds` times. Needs Linux and root (docs/lab.md), and a machine that does nothing else. Writes
`benchmarks/results/sums.jsonl`: a line for each size and number of pieces (0: the library's all-reduce), with the median and
the spread of the seconds in the lab, and what the bytes alone take.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

import tatami
from elsewhere import of_ranks
from tatami.bench.interleaved import machine
from tatami.cluster import Cluster, Link, Processor
from tatami.comm.rounds import MessageSum
from tatami.lab import Lab
from tatami.tiling.traffic import sum_schedule

RESULTS = Path(__file__).parent / "results" / "sums.jsonl"
SIZES_BYTES = tuple(4**power * 1024 for power in range(2, 7))
PIECES = (0, 1, 2, 3, 4)
_PAUSE_S = 0.01
"""Between two sums, so that links are idle when one begins."""


def measured(*, rounds: int) -> list[dict[str, float]]:
    """On every rank of the lab: for each size and number of pieces, the seconds of a sum."""
    comm = tatami.init()
    found = []
    for size_bytes in SIZES_BYTES:
        vector = torch.ones(size_bytes // 4)
        sums = {pieces: _sum_of(comm, len(vector), pieces) for pieces in PIECES if pieces}
        spent: dict[int, list[float]] = {pieces: [] for pieces in PIECES}
        for _ in range(rounds + 1):
            for pieces, seconds in spent.items():
                vector.fill_(1.0)
                comm.barrier()
                time.sleep(_PAUSE_S)
                start_s = time.perf_counter()
                sums[pieces].run(vector) if pieces else comm.allreduce(vector)
                seconds.append(time.perf_counter() - start_s)
                assert bool((vector == comm.size).all()), f"{pieces} pieces of {size_bytes} bytes"
        for pieces, seconds in spent.items():
            middle = median(seconds[1:])
            spread = (max(seconds[1:]) - min(seconds[1:])) / middle
            found.append({"bytes": size_bytes, "pieces": pieces, "seconds": middle, "spread": spread})
    return found


def _sum_of(comm: tatami.comm.AbstractCommunicator, size: int, pieces: int) -> MessageSum:
    stops = [size * piece // pieces for piece in range(pieces + 1)]
    schedules = [sum_schedule(comm.hosts, size=stop - start, element_bytes=4) for start, stop in pairwise(stops)]
    return MessageSum(comm, *schedules)


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="how many, of one rank each")
    parser.add_argument("--bandwidth", type=float, default=31.25e6, help="bytes/s of each host's link")
    parser.add_argument("--rounds", type=int, default=9, help="how often each way is taken")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file for the records")
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)  # the ranks in the lab are started with it
    options = parser.parse_args()
    if options.found is not None:
        found = measured(rounds=options.rounds)
        if tatami.init().rank == 0:
            options.found.write_text(json.dumps(found), encoding="utf-8")
        return
    link = Link(bandwidth_bytes_per_s=options.bandwidth, latency_s=50e-6)
    hosts = tuple(Processor(name=f"p{number}", host=f"h{number}", speed=10e9) for number in range(options.hosts))
    with tempfile.TemporaryDirectory(prefix="tatami-sums-") as folder:
        path = Path(folder) / "found.json"
        with Lab(Cluster(processors=hosts, network=link), paced=True) as lab:
            code = lab.run([__file__, "--found", str(path), "--rounds", str(options.rounds)], environment=of_ranks())
        if code != 0:
            sys.exit(f"sums: the ranks ended with exit code {code}")
        found = json.loads(path.read_text(encoding="utf-8"))
    for each in found:
        share = 2 * (options.hosts - 1) / options.hosts
        each |= {"hosts": options.hosts, "bytes_per_s": options.bandwidth, "bytes_s": share * each["bytes"] / options.bandwidth}
    lines = [{"what": "command", "command": shlex.join(["python", *sys.argv]), "machine": machine()}, *found]
    options.results.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
    for each in lines if options.json else found:
        words = "library" if not each.get("pieces") else f"{each['pieces']} pieces"
        print(json.dumps(each) if options.json else f"{each['bytes']:9,} bytes, {words}: {1e3 * each['seconds']:.1f} ms "
              f"(±{100 * each['spread']:.0f} %); bytes alone {1e3 * each['bytes_s']:.1f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
