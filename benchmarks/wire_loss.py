"""What half the bytes on the wire do to the loss:  python benchmarks/wire_loss.py [--seeds 5] [--iterations 200]

Scikit-learn's digits, 64-80-10, all 1,797 samples a batch, Adam at 0.01, over four ranks in two replicas of two: the sums of
both replicas and the gradients between them are rounded. Ranks are threads; nothing is timed, so the figures do not depend on
the machine beyond rounding. Writes benchmarks/results/wire_loss.jsonl: the command, and a line for each wire and seed.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import statistics
import sys
from pathlib import Path

import torch
from torch import nn

from tatami import Trainer, tile
from tatami.comm.base import AbstractCommunicator
from tatami.comm.threads import run_threads
from tatami.datasets.digits import load_digits
from tatami.tiling import Layout
from tatami.tiling.layout import Replica

RESULTS = Path(__file__).parent / "results" / "wire_loss.jsonl"
WIRES = (None, "bfloat16", "float16")
LAYOUT = Layout(
    replicas=(
        Replica(width=0.5, processors=("p0", "p1"), heights=(0.5, 0.5)),
        Replica(width=0.5, processors=("p2", "p3"), heights=(0.5, 0.5)),
    )
)


def trained(wire: str | None, *, seed: int, iterations: int) -> dict[str, object]:
    """One run, and what came of it."""
    digits = load_digits(targets="classes")
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(64, 80), nn.Sigmoid(), nn.Linear(80, 10))

    def body(comm: AbstractCommunicator) -> tuple[float, float]:
        model = tile(
            network, comm, batch_size=len(digits.x), speeds="equal", layout=LAYOUT, reduction="mean", wire=wire, quiet=True
        )
        trainer = Trainer(model, optimizer=functools.partial(torch.optim.Adam, lr=0.01), loss=nn.CrossEntropyLoss())
        losses = trainer.fit((digits.x, digits.y), batch_size=len(digits.x), iterations=iterations).losses
        return losses[0], losses[-1]

    first, last = run_threads(body, size=4)[0]
    return {"wire": wire or "float32", "seed": seed, "iterations": iterations, "first_loss": first, "last_loss": last}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = [trained(wire, seed=seed, iterations=args.iterations) for seed in range(args.seeds) for wire in WIRES]
    lines = [{"command": shlex.join(["python", *sys.argv])}, *rows]
    args.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    exact = {row["seed"]: row["last_loss"] for row in rows if row["wire"] == "float32"}
    for wire in WIRES[1:]:
        off = [row["last_loss"] / exact[row["seed"]] - 1 for row in rows if row["wire"] == wire]  # type: ignore[operator]
        print(f"{wire}: {statistics.median(off):+.2%}, from {min(off):+.2%} to {max(off):+.2%} of {len(off)} seeds")


if __name__ == "__main__":
    main()
