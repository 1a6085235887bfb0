"""Hundreds of odd inputs: each ends with an exit code and a few lines, without a traceback, and soon."""

import dataclasses
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer
from fuzz_inputs import LONG, fuzz_inputs, make_files
from typer.testing import CliRunner

import tatami.cli.training
from tatami.cli.app import app
from tatami.comm import launch
from tatami.errors import LabError

DONE, FAILED, REFUSED, STARTED = 0, 1, 2, 3
LONGEST_S = 10.0
"""Of a core."""
MEMORY_BYTES = 4 << 30
INPUTS = list(fuzz_inputs(app))
GROUPS = sorted({arguments[0] for arguments in INPUTS})
STARTS = (
    "tatami.doctor.examine",
    "tatami.bench.train.bench_train",
    "tatami.server.training.run_training",
    "tatami.sim.processes.Runs.map",
    "tatami.model.cluster_probe.probe",
)
"""Where a command has found nothing to refuse, and would start processes or measure for seconds."""


@pytest.fixture(autouse=True)
def _nothing_long_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def started(*_: object, **__: object) -> NoReturn:
        raise typer.Exit(STARTED)

    def launched(command: Sequence[str], *, ranks: int, hosts: Sequence[str] | None = None, **_: object) -> NoReturn:
        mpiexec = launch.Launcher(program=Path("mpiexec"), family="mpich")
        launch.launch_command(mpiexec, launch.rank_command(command), ranks=ranks, hosts=hosts)
        raise typer.Exit(STARTED)

    def no_lab() -> NoReturn:
        raise LabError("no lab is built in this test")

    train = tatami.cli.training.train

    def two_iterations(prepared: Any, *arguments: Any, **options: Any) -> Any:
        few = min(prepared.iterations or 2, 2)
        return train(dataclasses.replace(prepared, iterations=few), *arguments, **options)

    for name in STARTS:
        monkeypatch.setattr(name, started)
    monkeypatch.setattr("tatami.sim.processes.Runs.__init__", lambda _, **__: None)
    monkeypatch.setattr("tatami.sim.processes.Runs.close", lambda _: None)
    monkeypatch.setattr("tatami.lab.lab.require_lab", no_lab)
    monkeypatch.setattr("tatami.lab.needs.require_lab", no_lab)
    monkeypatch.setattr(tatami.cli.training, "train", two_iterations)
    monkeypatch.setattr(launch, "run", launched)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    make_files()


def test_there_are_enough_of_them() -> None:
    assert len(INPUTS) >= 500
    assert len({tuple(arguments) for arguments in INPUTS}) > 0.95 * len(INPUTS)


@pytest.mark.parametrize("group", GROUPS)
def test_every_input_ends_well(group: str) -> None:
    faults = [fault for arguments in INPUTS if arguments[0] == group for fault in faults_of(arguments)]
    assert faults == []


@contextmanager
def at_most(memory_bytes: int) -> Iterator[None]:
    """Let this process have so much more address space: an input must not take the machine's memory."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    now_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now_bytes + memory_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def faults_of(arguments: list[str]) -> list[str]:
    """What is wrong with how a command ended."""
    before = sorted(Path().iterdir())
    began_s = time.process_time()
    with at_most(MEMORY_BYTES):
        result = CliRunner().invoke(app, arguments)
    took_s = time.process_time() - began_s
    faults = []
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        faults.append(f"raised {type(result.exception).__name__}: {str(result.exception)[:200]}")
    elif result.exit_code not in (DONE, FAILED, REFUSED, STARTED):
        faults.append(f"ended with {result.exit_code}")
    for word in ("Traceback", "not enough memory"):
        if word in result.output:
            faults.append(f"said {word!r}")
    if result.exit_code in (FAILED, REFUSED) and not result.stderr.strip():
        faults.append("said nothing")
    if result.exit_code == REFUSED:
        if sorted(Path().iterdir()) != before:
            faults.append(f"left {sorted({*Path().iterdir()} - {*before})} behind")
        if len(result.stderr) > 8000 or len(result.stderr.splitlines()) > 40:
            faults.append(f"said {len(result.stderr)} characters in {len(result.stderr.splitlines())} lines")
    if took_s > LONGEST_S:
        faults.append(f"took {took_s:.1f} s of a core")
    shown = " ".join(word if len(word) < 50 else f"{word[:20]}...({len(word)})" for word in arguments)
    return [f"tatami {shown}: {fault}" for fault in faults]


def test_a_long_text_is_not_repeated_in_full() -> None:
    for arguments in (["train", "--method", "n" * LONG], ["plan", "--speeds", "1,1", "--planner", "n" * LONG]):
        assert len(CliRunner().invoke(app, arguments).stderr) < 1100
