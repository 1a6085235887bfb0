"""How long ranks take to start, and what memory they take, as copies of the command and as processes of their own:

    python benchmarks/starting.py [-n 2,4] [--rounds 5]

Starts a script that tiles a small network, in turn in both ways. Prints a JSON line for each round.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from tatami.bench.interleaved import machine

WAYS = {
    "copies": ["-m", "tatami", "run", "-n"],
    "processes": ["-c", "import sys; from tatami.comm import run; sys.exit(run(sys.argv[2:], ranks=int(sys.argv[1])))"],
}


def be_rank() -> None:
    """Tile a network, and print what memory the ranks take together; what they share counts once."""
    import torch

    import tatami

    comm = tatami.init()
    network = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.ReLU(), torch.nn.Linear(40, 5))
    tatami.tile(network, comm, sample=torch.ones(8, 20), batch_size=8, speeds=[1.0] * comm.size)
    comm.barrier()
    facts = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    total = sum(comm.allgather_object(int(facts["Pss"].split()[0]) * 1024))
    if comm.rank == 0:
        print(json.dumps({"memory_bytes": total}), flush=True)
    comm.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-n", dest="ranks", default="2,4", help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.rank:
        be_rank()
        return
    for ranks in map(int, wanted.ranks.split(",")):
        for round_ in range(wanted.rounds):
            for how, words in WAYS.items():
                before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
                command = [sys.executable, *words, str(ranks), __file__, "--rank"]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began_s
                cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                memory = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
                what = {"what": "start", "ranks": ranks, "how": how, "round": round_, "seconds": seconds, "cpu_s": cpu_s}
                print(json.dumps({**what, **memory, "machine": machine()}), flush=True)


if __name__ == "__main__":
    main()
