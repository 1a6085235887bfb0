"""Tatami and what one would use instead, in the same processes:  python benchmarks/rivals.py [OPTIONS]

    --networks gpt,vit --hosts 2,4 --bandwidths 125e6           part of the grid
    --contestants tatami,ddp-weighted,pipelining                some contestants; tatami-flat and tatami-float16, too
    --networks gpt --layers 8 --width 384 --dilate 3            another GPT
    --speeds 1,1,0.5                                            other hosts
    --quotas                                                    hosts that have parts of a core, in place of paced ones
    --report                                                    only the table and the picture of what is recorded

Every cell is a paced lab (docs/lab.md) of hosts of unequal speed, of which the fastest compute 45 Gflop/s: a network of
`racing/networks.py`, 2, 4 or 8 hosts, and links of 100 Mbit/s, 1 or 10 Gbit/s. All contestants take turns in the same
processes. After the first step each is held against the plain network. Adds a line for each to
`benchmarks/results/rivals.jsonl`; cells that are there are skipped. Needs Linux and root, and a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from elsewhere import of_ranks
from racing.cells import BANDWIDTHS, CONTESTANTS, FLOP_PER_S, SPEEDS, Cell, Record, grid_cell, is_recorded, read
from racing.networks import SIZES
from racing.tables import write_report
from tatami.bench.interleaved import machine
from tatami.errors import LabError
from tatami.lab import Lab
from tatami.report import EfficiencyRound, efficiency

RESULTS = Path(__file__).parent / "results" / "rivals.jsonl"
_START_S = {2: 20.0, 4: 35.0, 8: 50.0}
"""Until all are made: starting the lab, measuring the machines, tracing."""
_STEPS, _COMPUTE_S, _WEIGHTS, _EXPOSED = 2.5, 0.4, 0.5e6, 0.75
"""For the estimate: iterations of each contestant before those that are timed, what one computes, weights of a network, and how
much of their exchange is not hidden."""


def cells_of(options: argparse.Namespace) -> Iterator[Cell]:
    """The cells that the command line names."""
    shape = {name: value for name in ("layers", "width", "heads", "tokens") if (value := getattr(options, name)) is not None}
    for network in _words(options.networks):
        if network not in SIZES:
            raise SystemExit(f"--networks {network}: the grid has {', '.join(SIZES)}")
        for hosts in [len(_numbers(options.speeds))] if options.speeds else map(int, _words(options.hosts)):
            for bandwidth in _numbers(options.bandwidths):
                known = min(SPEEDS, key=lambda each: abs(each - hosts))
                cell = grid_cell(network, known, bandwidth, rounds=options.rounds)
                yield replace(
                    cell,
                    speeds=tuple(_numbers(options.speeds)) if options.speeds else SPEEDS[hosts],
                    shape={**cell.shape, **{name: value for name, value in shape.items() if name in cell.shape}},
                    samples=options.samples or cell.samples,
                    repeats=options.repeats or cell.repeats,
                    flop_per_s=None if options.quotas else options.paced,
                    dilation=1.0 if options.quotas else options.dilate or cell.dilation,
                )


def measured(cell: Cell, contestants: Sequence[str], *, timeout_s: float) -> dict[str, Any]:
    """What the ranks of one lab find.

    Raises:
        LabError: they did not come to an end.
    """
    with tempfile.TemporaryDirectory(prefix="tatami-rivals-") as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="latency is not emulated")
        description, found = Path(folder) / "cell.json", Path(folder) / "found.json"
        description.write_text(json.dumps({"cell": cell.to_dict(), "contestants": contestants}), encoding="utf-8")
        with Lab(cell.cluster, paced=cell.flop_per_s is not None, dilation=cell.dilation) as lab:
            code = lab.run(
                ["-m", "racing.rank", str(description), str(found)],
                environment={
                    **of_ranks(preload=("racing.rank", "torch.export", "tatami.parallel.data_parallel")),
                    "GLOO_SOCKET_IFNAME": "eth0",
                },
                timeout_s=timeout_s,
            )
        if code != 0:
            raise LabError(f"the ranks ended with exit code {code}; what they said is above")
        result: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
        return result


def records_of(cell: Cell, found: Mapping[str, Any], *, facts: Mapping[str, Any]) -> list[Record]:
    """A line for each contestant: its times in the lab, in seconds of the hosts, gamma, or why it could not take part."""
    lines = []
    for name, line in found["lines"].items():
        times: Record = {}
        if "rounds_s" in line:
            rounds_s = line["rounds_s"]
            pairs = zip(rounds_s, found["alone_s"], strict=True)
            result = efficiency([EfficiencyRound(iteration_s=one, alone_s=tuple(alone)) for one, alone in pairs])
            middle_s = median(rounds_s)
            times = {
                "iteration_s": middle_s / cell.dilation,
                "lab_iteration_s": middle_s,
                "spread": (max(rounds_s) - min(rounds_s)) / middle_s,
                "gamma": None if result.problem else result.gamma,
                "gamma_problem": result.problem,
            }
        common = {"parameters": found["parameters"], "measured": found["measured"]}
        lines.append({"contestant": name, **cell.to_dict(), "hosts": len(cell.speeds), **times, **line, **common, **facts})
    return lines


def estimate_s(cell: Cell, contestants: Sequence[str], recorded: Sequence[Record]) -> float:
    """How long a cell takes: as long as the same one before, or else by what its weights and its hosts take."""
    before = [each["cell_s"] for each in recorded if cell.is_of({**each, "rounds": cell.rounds})]
    if before:
        return float(before[-1])
    weights_s = 8 * _WEIGHTS / cell.bandwidth_bytes_per_s * cell.dilation if cell.network != "perceptron" else 0.0
    iterations = len(contestants) * (cell.rounds + _STEPS)
    return _START_S.get(len(cell.speeds), 50.0) + iterations * (_COMPUTE_S + _EXPOSED * weights_s)


def run(cells: Sequence[Cell], contestants: Sequence[str], options: argparse.Namespace, *, command: str) -> int:
    """Measure the cells one after the other; returns how many failed."""
    recorded = read(options.out)
    left = [cell for cell in cells if options.again or not is_recorded(cell, recorded, contestants)]
    total_s = sum(estimate_s(cell, contestants, recorded) for cell in left)
    print(f"{len(left)} of {len(cells)} cells are to be measured: about {total_s / 60:.0f} minutes", flush=True)
    failed = 0
    for number, cell in enumerate(left, 1):
        title = f"{cell.network}, {len(cell.speeds)} hosts, {8e-6 * cell.bandwidth_bytes_per_s:,.0f} Mbit/s"
        print(f"{number} of {len(left)}: {title}", flush=True)
        began, start_s = time.strftime("%Y-%m-%dT%H:%M:%S"), time.monotonic()
        try:
            found = measured(cell, contestants, timeout_s=options.timeout)
        except LabError as error:
            failed += 1
            print(f"{title}: {error}; it is not recorded", file=sys.stderr, flush=True)
            continue
        cell_s = time.monotonic() - start_s
        facts = {"began": began, "cell_s": cell_s, "commit": _commit(), "command": command, "machine": machine()}
        lines = records_of(cell, found, facts=facts)
        with options.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        for line in lines:
            print(_told(line), flush=True)
        print(f"{cell_s:.0f} s", flush=True)
    return failed


def _told(line: Record) -> str:
    if "cannot" in line:
        return f"  {line['contestant']:22} cannot: {line['cannot']}"
    gamma = "-" if line["gamma"] is None else f"{line['gamma']:.2f}"
    share = line["late_s"] / sum(line["rounds_s"]) / line["repeats"]
    late = f", late by {share:.0%}, {line['cpu_s']:.2f} s of a core"
    own = line.get("planned", "").splitlines()[-1:] or [str(line[each]) for each in ("pipeline",) if each in line]
    times = f"{line['lab_iteration_s']:.3f} s in the lab ±{100 * line['spread']:.0f} %, gamma {gamma}"
    return f"  {line['contestant']:22} {times}, update off by {line['update_error']:.1g}{late}; {''.join(own)}"


def _commit() -> str:
    """Of this checkout; with a + where files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        ).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no", "*.py") else "")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str) -> list[float]:
    return [float(word) for word in _words(text)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Race, tell, keep, and draw."""
    options = _options(arguments)
    failed = 0
    if not options.report:
        words = sys.argv[1:] if arguments is None else arguments
        failed = run(
            list(cells_of(options)),
            _words(options.contestants),
            options,
            command=shlex.join(["python", "benchmarks/rivals.py", *words]),
        )
    if options.report:
        print(f"{', '.join(str(path) for path in write_report(options.out))} written")
    if failed:
        sys.exit(f"rivals: {failed} cells failed; the same command measures them again")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(SIZES))
    parser.add_argument("--hosts", default=",".join(map(str, SPEEDS)))
    parser.add_argument("--bandwidths", default=",".join(f"{each:g}" for each in BANDWIDTHS), help="bytes per second of links")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS))
    parser.add_argument("--speeds", help="of other hosts, relative")
    parser.add_argument("--paced", type=float, default=FLOP_PER_S, help="flop/s of a host of speed 1")
    parser.add_argument("--dilate", type=float, help="so many times as long all takes; by default as the network needs it")
    parser.add_argument("--quotas", action="store_true", help="hosts have parts of a core")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, help="iterations of a timing")
    for name in ("samples", "layers", "width", "heads", "tokens"):
        parser.add_argument(f"--{name}", type=int, help="another size than the grid's")
    parser.add_argument("--again", action="store_true", help="measure cells that are recorded, too")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one lab")
    parser.add_argument("--report", action="store_true", help="measure nothing; write the table and the picture")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a .jsonl file, to which lines are added")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
