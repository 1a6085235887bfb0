"""Run a benchmark and keep what it measured:  python benchmarks/record.py NAME [OPTIONS]

runs `tatami bench NAME --json OPTIONS` and writes its JSON lines to `benchmarks/results/NAME.jsonl`, after a line with the
command. Every line of a measurement holds its parameters and the machine.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def record(name: str, options: list[str]) -> Path:
    """Run the benchmark; returns the file its results are in. What was there before is replaced once the run has succeeded."""
    words = ["bench", name, "--json", *options]
    done = subprocess.run([sys.executable, "-m", "tatami", *words], stdout=subprocess.PIPE, text=True, check=True)
    path = RESULTS / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"command": shlex.join(["tatami", *words])}) + "\n" + done.stdout, encoding="utf-8")
    return path


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    print(record(sys.argv[1], sys.argv[2:]))
