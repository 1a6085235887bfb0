"""Records that were damaged or made up: each is shown, or refused in one sentence that names the place."""

import copy
import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from page_rig import a_run
from rich.console import Console
from typer.testing import CliRunner

from tatami.cli.app import app
from tatami.cli.watch import frame
from tatami.errors import InputError
from tatami.report.page import GrowingLog, page_of, read_run

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MUTATIONS = 300
VALUES: tuple[Any, ...] = (None, True, -1, 0, 3, 1e308, float("inf"), float("nan"), 10**30)
VALUES += ("", "x", "\ud800", [], [1], {}, {"x": 1})


def logs() -> Iterator[list[dict[str, Any]]]:
    yield a_run()
    lines = (RESULTS / "report.jsonl").read_text().splitlines()
    by_event = {json.loads(line)["event"]: json.loads(line) for line in lines}
    watch = {"alarms": [{"what": "p1", "at": 3, "began": 2, "slower": 1.5, "error": 0.1}], "price_s": {"whole": 1.0}}
    by_event["watch"] = {"event": "watch", "iteration": 4, "speeds": {"p0": 1.0}, **watch, "lost_s": {"whole": 0.5}}
    failure = {"event": "failure", "iteration": 5, "who": "w", "process": "p", "how": "h", "silent_s": 0.5, "at_s": 1.0}
    by_event["failure"] = failure
    by_event["error"] = {"event": "error", "iteration": 6, "kind": "TrainingError", "message": "m"}
    yield list(by_event.values())


def mutated(value: Any, chance: random.Random) -> Any:
    """A copy of which one part is another value, or gone, or there under another name."""
    root = copy.deepcopy({"": value})
    at: Any = root
    while True:
        key = chance.choice(list(at) if isinstance(at, dict) else range(len(at)))
        inner = at[key]
        if at is not root and (not isinstance(inner, (dict, list)) or not inner or chance.random() < 0.2):
            break
        at = inner
    how = chance.choice(("value", "value", "value", "gone", "renamed"))
    if how == "value":
        at[key] = copy.deepcopy(chance.choice(VALUES))
    elif how == "gone" or isinstance(at, list):
        del at[key]
    else:
        at[key + "x"] = at.pop(key)
    return root[""]


def shown_or_refused(path: Path) -> str:
    """What was said of it; "" where it was shown."""
    ways: tuple[Callable[[], Any], ...] = (
        lambda: page_of(read_run(path), title="run"),
        lambda: Console(file=io.TextIOWrapper(io.BytesIO(), "utf-8")).print(frame(read_run(path), name="run", columns=80)),
        lambda: GrowingLog(path).read(),
    )
    said = set()
    for way in ways[: 2 if path.suffix == ".json" else 3]:
        try:
            way()
            said.add("")
        except InputError as error:
            said.add(str(error))
    assert len(said) == 1, said
    return said.pop()


@pytest.mark.parametrize("number", range(2))
def test_mutated_records_are_shown_or_refused(tmp_path: Path, number: int) -> None:
    chance, records = random.Random(number), list(logs())[number]
    path, said = tmp_path / "run.jsonl", []
    for _ in range(MUTATIONS):
        one = chance.randrange(len(records))
        changed = [mutated(record, chance) if index == one else record for index, record in enumerate(records)]
        path.write_text("".join(json.dumps(record) + "\n" for record in changed))
        said.append(shown_or_refused(path))
        assert "\n" not in said[-1]
        assert len(said[-1]) < 700
        assert said[-1] == "" or said[-1].startswith(f"line {one + 1} of {path}")
    assert MUTATIONS / 5 < sum(map(bool, said)) < MUTATIONS


def test_mutated_reports_of_elastic_runs_are_shown_or_refused(tmp_path: Path) -> None:
    chance, path, said = random.Random(2), tmp_path / "repairs.json", []
    report = json.loads((RESULTS / "report-repairs.json").read_text())
    for _ in range(MUTATIONS):
        path.write_text(json.dumps(mutated(report, chance)))
        said.append(shown_or_refused(path))
        assert str(path) in said[-1] or not said[-1]
    assert any(said)


def test_bytes_that_were_changed_are_shown_or_refused(tmp_path: Path) -> None:
    chance, path = random.Random(3), tmp_path / "run.jsonl"
    whole = "".join(json.dumps(record) + "\n" for record in a_run()[:12]).encode()
    for _ in range(MUTATIONS // 2):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.choice(b'\0"{}[],:0\\e\xff')
        path.write_bytes(data)
        for way in (lambda: page_of(read_run(path), title="run"), lambda: GrowingLog(path).read()):
            try:
                way()
            except InputError as error:
                assert str(path) in str(error)  # noqa: PT017 - either is right


@pytest.mark.parametrize("command", [["report", "-o", "run.html"], ["watch", "--once"]])
def test_the_commands_say_it_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    records = [*a_run()[:2], {"event": "train", "iteration": 3, "loss": "low"}]
    Path("run.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    ended = CliRunner().invoke(app, [*command, "run.jsonl"])
    assert isinstance(ended.exception, (InputError, SystemExit))
    told = str(ended.exception) if isinstance(ended.exception, InputError) else ended.output
    assert "line 3 of run.jsonl, a record of 'train', has 'low' as 'loss', which must be a number or null" in told.replace(
        "\n", " "
    )
