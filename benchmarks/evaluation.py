"""The paper's evaluation, measured in labs on this machine:  python benchmarks/evaluation.py [OPTIONS]

    --part efficiency --n 4,8 --condition A     only so much of it; what was measured before is kept for the rest
    --paced 0.3e9 --net original                on hosts that last as long as those of the paper did:
                                                `evaluation-paced-*`, by Mbit/s of the links
    --report                                    measure nothing, write tables and pictures from the records

Needs Linux and root (see docs/lab.md), and a machine with nothing else to do: more than an hour on 2 cores. Writes
`benchmarks/results/evaluation.jsonl` (a record a line, with the machine's description), `evaluation.md` and pictures.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from paper.lab import run_job
from paper.pictures import draw_breakdown, draw_courses, draw_efficiency, draw_model, draw_rivals
from paper.setting import (
    BATCHES,
    DYNAMIC,
    FAST_ETHERNET,
    GIGABIT,
    LARGE,
    ORIGINAL,
    RIVALS,
    SIZES,
    TIMED_BFLOAT16,
    Condition,
    EvaluationJob,
    SpeedChange,
    grids,
)
from paper.tables import breakdown_table, course_table, efficiency_table, model_table, rivals_table
from tatami.bench.interleaved import machine
from tatami.errors import LabError
from tatami.report import Table, blank, save

RESULTS = Path(__file__).parent / "results"
PARTS = ("efficiency", "courses", "rivals")
NETS = {"large": LARGE, "original": ORIGINAL}
KEY = ("part", "condition", "num", "net", "bandwidth_bytes_per_s")
STATIC = ("weighted", "srpm", "srpm-merged", "timed")
RETILED = ("drpm", "drpm-speeds", "drpm-timed")
COURSES = (*DYNAMIC, "srpm")


def jobs(options: argparse.Namespace) -> Iterator[EvaluationJob]:
    """What is to be measured, a lab for each."""
    for net in (NETS[name] for name in options.net):
        small = net == ORIGINAL
        base = EvaluationJob(
            part="efficiency",
            condition="A",
            num=8,
            net=net,
            paced=options.paced,
            balance=options.balance,
            bandwidth_bytes_per_s=options.bandwidth,
            samples=BATCHES[net],
            contestants=(),
            rounds=5,
            repeats=options.repeats or (20 if small else 2),
            serial_s=3.0 if small else 6.0,
        )
        for condition in options.condition if "efficiency" in options.part else ():
            for num in options.n:
                names = (*grids(num), *STATIC, *RETILED)
                yield replace(base, condition=condition, num=num, contestants=names)
        if small:
            continue
        if "courses" in options.part:
            yield replace(
                base,
                part="courses",
                contestants=COURSES,
                course=options.course,
                step=SpeedChange(after_iteration=options.course // 2, host="h4", speed=0.4 * (options.paced or 1.0)),
            )
        if "rivals" in options.part:
            for bandwidth in (GIGABIT, FAST_ETHERNET):
                names = ("weighted", "srpm", "timed", TIMED_BFLOAT16, *RETILED, *RIVALS)
                yield replace(base, part="rivals", bandwidth_bytes_per_s=bandwidth, contestants=names)


def measure(options: argparse.Namespace, path: Path) -> None:
    """Run the jobs, and replace their results in the file, job by job: a stopped run loses only its last."""
    begun_s = time.monotonic()
    for job in jobs(options):
        print(
            f"{time.monotonic() - begun_s:5.0f} s  {job.part}: {job.net}, condition {job.condition}, N = {job.num}", flush=True
        )
        described = {"machine": machine(), "paced": options.paced, "balance": options.balance}
        found = [{**record, **described} for record in run_job(job, cores=options.cores)]
        for record in found:
            if record["record"] == "iteration":
                gamma = "-" if record["efficiency"] is None else f"{record['efficiency']:.2f}"
                print(f"         {record['contestant']:13} {1e3 * record['iteration_s']:8.1f} ms  {gamma}")
        measured = {_key(record) for record in found}
        kept = [record for record in read(path) if _key(record) not in measured]
        path.write_text("".join(json.dumps(record) + "\n" for record in [*kept, *found]), encoding="utf-8")
    print(f"{time.monotonic() - begun_s:5.0f} s  done")


def read(path: Path) -> list[dict[str, Any]]:
    """The records so far."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def write_tables(records: Sequence[dict[str, Any]], path: Path) -> None:
    """All tables in one document."""
    tables: list[Table] = []
    cases = _cases(records)
    tables += [efficiency_table(records, condition=condition, net=net) for net, condition in cases]
    for (net, condition), num in cases.items():
        tables.append(breakdown_table(records, condition=condition, net=net, num=num))
    tables += [course_table(records), rivals_table(records), model_table(records)]
    described = records[-1]["machine"]
    head = (
        f"# The evaluation\n\nMade by `python benchmarks/evaluation.py` from `{path.stem}.jsonl`. Measured in labs "
        f"(docs/lab.md) on: {described['cpu']}, {described['cores']} cores, {described['system']}, "
        f"torch {described['torch']}.\n"
    )
    texts = [f"## {table.title[0].upper()}{table.title[1:]}\n\n{markdown(table)}\n" for table in tables if table.rows]
    path.write_text("\n".join([head, *texts]), encoding="utf-8")


def markdown(table: Table) -> str:
    """A table for a README; the best row is bold, lines of one cell are parted by `<br>`."""
    rows = [table.headers, ["--:" if index in table.numbers else ":--" for index in range(len(table.headers))]]
    for index, row in enumerate(table.rows):
        cells = [cell.replace("|", "\\|").replace("\n", "<br>") for cell in row]
        rows.append([f"**{cell}**" if index == table.best and cell else cell for cell in cells])
    return "\n".join(f"| {' | '.join(cell.replace(chr(10), ' ') for cell in cells)} |" for cells in rows)


def draw(records: Sequence[dict[str, Any]], stem: Path) -> None:
    """All pictures for which there are records, in files whose names begin with `stem`."""
    for (net, condition), num in _cases(records).items():
        name = f"{next(short for short, long in NETS.items() if long == net)}-{condition}"
        figure, ax = blank(width_in=8.5, height_in=4.8)
        draw_efficiency(ax, records, condition=condition, net=net)
        ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9)
        save(figure, stem.with_name(f"{stem.name}-efficiency-{name}.png"), force=True)
        figure, ax = blank(height_in=4.5)
        draw_breakdown(ax, records, condition=condition, net=net, num=num)
        save(figure, stem.with_name(f"{stem.name}-breakdown-{name}.png"), force=True)
    if any(each["record"] == "course" for each in records):
        for name, shown in {
            "course": {
                "drpm": "DRPM",
                "drpm-speeds": "DRPM, speeds known",
                "published": "as published",
                "srpm": "SRPM, never re-mapped",
            },
            "thresholds": {"drpm": "0.4, 0.8", "T 0.4, 0.9": "0.4, 0.9", "T 0.3, 0.8": "0.3, 0.8"},
            "windows": {"drpm": "L = 6, R = 20", "L 3": "L = 3", "L 8": "L = 8", "R 10": "R = 10", "R 30": "R = 30"},
        }.items():
            figure, ax = blank()
            draw_courses(ax, records, contestants=tuple(shown), labels=tuple(shown.values()))
            save(figure, stem.with_name(f"{stem.name}-{name}.png"), force=True)
    if any(each["part"] == "rivals" for each in records):
        figure, ax = blank()
        draw_rivals(ax, records)
        save(figure, stem.with_name(f"{stem.name}-rivals.png"), force=True)
    if any("predicted_s" in each for each in records if each["record"] == "iteration"):
        figure, ax = blank(height_in=5.5)
        draw_model(ax, records)
        save(figure, stem.with_name(f"{stem.name}-model.png"), force=True)


def main() -> None:
    """Measure, then report."""
    options = _options()
    options.results.mkdir(parents=True, exist_ok=True)
    paced = "" if options.paced is None else f"-paced-{8e-6 * options.bandwidth:g}"
    path = options.results / f"evaluation{paced}.jsonl"
    if not options.report:
        try:
            measure(options, path)
        except LabError as error:
            sys.exit(f"evaluation: {error}")
    records = read(path)
    if not records:
        sys.exit(f"evaluation: there are no records in {path}")
    write_tables(records, path.with_suffix(".md"))
    draw(records, path.with_suffix(""))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=_words(PARTS), default=PARTS, metavar=",".join(PARTS))
    parser.add_argument("--n", type=_numbers, default=SIZES, metavar="4,8", help="processors, for efficiency")
    parser.add_argument("--condition", type=_words(get_args(Condition)), default=get_args(Condition), metavar="A,B")
    parser.add_argument("--net", type=_words(tuple(NETS)), default=tuple(NETS), metavar="large,original")
    parser.add_argument("--course", type=int, default=100, help="iterations of each course")
    parser.add_argument("--paced", type=float, metavar="FLOP/S", help="of a host of speed 1; quotas where it is left out")
    parser.add_argument("--balance", type=float, default=1.0, help="flop that a paced host does while it moves a byte")
    parser.add_argument("--bandwidth", type=float, default=GIGABIT, help="of the links, in bytes/s")
    parser.add_argument("--repeats", type=int, help="iterations of each block")
    parser.add_argument("--cores", type=float, help="of this machine, for the labs; all where it is left out")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder for records, tables and pictures")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    return parser.parse_args()


def _words(choices: Sequence[str]) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        words = tuple(text.split(","))
        if wrong := [word for word in words if word not in choices]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(choices)}")
        return words

    return parse


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(map(int, text.split(",")))
    if wrong := [number for number in numbers if number not in SIZES]:
        raise argparse.ArgumentTypeError(f"{wrong[0]} is none of {', '.join(map(str, SIZES))}")
    return numbers


def _cases(records: Sequence[dict[str, Any]]) -> dict[tuple[str, str], int]:
    """The networks and conditions whose efficiency was measured, the large network first, with the largest N of each."""
    sizes: dict[tuple[str, str], int] = {}
    for each in records:
        if each["part"] == "efficiency":
            case = each["net"], each["condition"]
            sizes[case] = max(each["num"], sizes.get(case, 0))
    order = list(NETS.values())
    return dict(sorted(sizes.items(), key=lambda item: (order.index(item[0][0]), item[0][1])))


def _key(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record[name] for name in KEY)


if __name__ == "__main__":
    main()
