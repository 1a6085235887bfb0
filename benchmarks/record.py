"""Run benchmarks and keep what they measured:  python benchmarks/record.py NAME ...

runs the command of each NAME (below; all of them without one) and writes its JSON lines to `benchmarks/results/NAME.jsonl`,
after a line with the command. Every line of a measurement holds its parameters and the machine. What was there before is
replaced once a run has succeeded.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results"
COMMANDS = {
    "train": "bench train --rounds 15 --json",
    "allreduce": "bench allreduce -n 2 --json",
    "allreduce-8-ranks": "bench allreduce -n 8 --sizes 1KiB,64KiB,1MiB,16MiB --json",
    "put-vs-allgather": "run -n 2 benchmarks/bench_put.py",
    "dataparallel": "run -n 2 benchmarks/bench_data_parallel.py",
    "one-host": "run -n 2 benchmarks/one_host.py",
    "starting": "benchmarks/starting.py",
    "functions": "run -n 2 benchmarks/bench_functions.py",
    "server": "benchmarks/bench_server.py",
    # In the lab, as root: four hosts of two ranks with links of 1 Gbit/s.
    "allreduce-four-hosts": (
        "lab run benchmarks/four-hosts-of-two.toml -- -m tatami bench allreduce --sizes 1MiB,16MiB,64MiB --rounds 5 "
        "--algorithms mpi,gloo,ring,torus,torus_put,hierarchical+ring,hierarchical+native,hierarchical+halving_doubling --json"
    ),
}


def record(name: str) -> Path:
    """Run the command of a name; returns the file its results are in."""
    words = shlex.split(COMMANDS[name])
    starter = ["python"] if words[0].endswith(".py") else ["tatami"]
    started_by = [sys.executable] if starter == ["python"] else [sys.executable, "-m", "tatami"]
    done = subprocess.run([*started_by, *words], stdout=subprocess.PIPE, text=True, check=True, cwd=HERE.parent)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    path = RESULTS / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([json.dumps({"command": shlex.join([*starter, *words])}), *lines, ""]), encoding="utf-8")
    return path


if __name__ == "__main__":
    unknown = [name for name in sys.argv[1:] if name not in COMMANDS]
    if unknown:
        sys.exit(f"no benchmark is called {', '.join(unknown)}; there are: {', '.join(COMMANDS)}")
    for name in sys.argv[1:] or COMMANDS:
        print(record(name), flush=True)
