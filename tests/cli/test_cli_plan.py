"""`tatami plan`: the table, the records, the picture; and that it answers without torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tatami.cli.app import app
from tatami.tiling import PLANNERS

SPEEDS = "0.25,0.31,0.63,1,1"
CLUSTER = """
[network]
bandwidth = "1 Gbit/s"
latency = "50 us"

[[processors]]
name = "old"
speed = 1.0
host = "a"

[[processors]]
name = "new"
speed = 3.0
host = "b"
"""


def records(*arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert isinstance(answer, list)
    return answer


def test_json_is_exactly_a_list_with_a_record_for_each_planner() -> None:
    answer = records("--speeds", SPEEDS, "--net", "203-80-26", "--samples", "1024")
    assert [record["planner"] for record in answer] == list(PLANNERS)
    srpm = next(record for record in answer if record["planner"] == "srpm")
    assert srpm["columns"] == [["p0", "p1", "p2"], ["p3", "p4"]]
    assert srpm["samples"] == [382, 642]
    assert srpm["units"] == [[17, 21, 42], [40, 40]]
    assert srpm["t_comm"] == pytest.approx(2 * 26 * 1024 * 2 * 1.19 / 3.19 + 2 * (26 + 203) * 80)
    for record in answer:
        assert isinstance(record["predicted_s"], float)
        assert isinstance(record["gap"], float)
        assert record["predicted_s"] > 0
        assert record["gap"] >= -1e-9


def test_more_processors_than_units_are_laid_in_data_parallel_columns() -> None:
    for record in records("--speeds", ",".join(["1"] * 100), "--samples", "1000"):
        assert record["left_out"] == []
        assert sum(record["samples"]) == 1000


def test_planner_restricts_and_may_be_given_again() -> None:
    answer = records("--speeds", SPEEDS, "--planner", "weighted", "--planner", "even")
    assert [record["planner"] for record in answer] == ["weighted", "even"]
    assert records("--speeds", SPEEDS, "--planner", "weighted, even") == answer
    assert answer[0]["columns"] == [["p0"], ["p1"], ["p2"], ["p3"], ["p4"]]


def test_a_cluster_file_gives_names_and_speeds_and_speeds_replace_its_own(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER)
    (own,) = records(str(file), "--planner", "weighted", "--samples", "100")
    assert (own["columns"], own["samples"]) == ([["old"], ["new"]], [25, 75])
    (given,) = records(str(file), "--planner", "weighted", "--samples", "100", "--speeds", "1,1")
    assert given["samples"] == [50, 50]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_line_of_the_table_is_cut(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    result = CliRunner().invoke(app, ["plan", "--speeds", SPEEDS])
    assert result.exit_code == 0
    assert "…" not in result.stdout
    for planner in PLANNERS:
        assert planner in result.stdout
    assert "76,367.3" in result.stdout
    if columns >= 80:
        *table, _ = result.stdout.splitlines()
        assert max(map(len, table)) <= columns, "only the advice is left to the terminal to break"


GPT = ("--model", "gpt", "--layers", "2", "--width", "48", "--heads", "6", "--tokens", "16", "--vocabulary", "100")


def test_a_gpt_is_planned_by_its_sizes() -> None:
    answer = records("--speeds", "1,0.5,0.25,1", *GPT, "--samples", "32")
    assert [record["planner"] for record in answer] == list(PLANNERS)
    weighted, timed = (next(each for each in answer if each["planner"] == name) for name in ("weighted", "timed"))
    assert weighted["against_weighted"] == 1.0
    assert timed["against_weighted"] >= 1.0
    for record in answer:
        assert sum(record["samples"]) == 32
        assert {sum(column) for column in record["units"]} == {192}
        assert record["against_weighted"] == pytest.approx(weighted["predicted_s"] / record["predicted_s"])
        assert set(record["memory_bytes"]) == {"p0", "p1", "p2", "p3"}
    few, many = (records("--speeds", "1", *GPT, "--planner", "timed", "--kv-heads", heads)[0] for heads in ("2", "6"))
    assert few["memory_bytes"]["p0"] < many["memory_bytes"]["p0"]


def test_the_advice_is_one_sentence_below_the_table() -> None:
    result = CliRunner().invoke(app, ["plan", "--speeds", SPEEDS])
    assert result.stdout.splitlines()[-1].startswith("Weighted data parallelism does about as well; by the rule of thumb")


def test_memory_used_of_memory_given_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        "".join(f'[[processors]]\nname = "p{index}"\nspeed = 1\nmemory = "{index + 3} MiB"\n' for index in range(2))
    )
    result = CliRunner().invoke(app, ["plan", str(file), *GPT, "--samples", "8"])
    assert result.exit_code == 0, result.output
    assert "memory, of the processor where it is fullest" in result.stdout
    assert re.search(r"timed +p0 +[\d.]+ MiB +3 MiB +[\d.]+ %", result.stdout)
    cramped = CliRunner().invoke(app, ["plan", str(file), *GPT, "--samples", "800"])
    assert cramped.exit_code == 2
    assert re.search(r"finds no room for 800 samples of this network: p0 lacks .* It would hold \d+ samples", cramped.stderr)


def test_one_planner_is_drawn_in_characters() -> None:
    result = CliRunner().invoke(app, ["plan", "--speeds", "1,3", "--planner", "weighted"])
    assert "│" in result.stdout
    assert "p0" in result.stdout
    assert "75 %" in result.stdout


def test_plot_writes_the_picture_and_does_not_overwrite_unasked(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "tiling.png"
    arguments = ["plan", "--speeds", "1,3", "--plot", str(picture)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.write_bytes(b"mine")
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 2
    assert "exists already" in again.stderr
    assert picture.read_bytes() == b"mine"
    assert CliRunner().invoke(app, [*arguments, "--force"]).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_who_is_left_out_is_named_in_a_warning_of_one_line() -> None:
    result = CliRunner().invoke(app, ["plan", "--speeds", "0.000001,1", "--planner", "srpm", "--json"])
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: srpm leaves out p0: too slow")
    assert json.loads(result.stdout)[0]["left_out"] == ["p0"]


def test_plan_answers_without_torch() -> None:
    code = (
        "import sys; from tatami.cli.app import app; app(['plan', '--speeds', '1,2', '--json'], standalone_mode=False); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["planner"] == "even"


def test_version_and_help() -> None:
    version = CliRunner().invoke(app, ["--version"])
    assert version.stdout.startswith("tatami ")
    help_text = CliRunner().invoke(app, ["plan", "--help"]).stdout
    assert "--speeds 0.25,0.31,0.63,1,1" in help_text
    commands = CliRunner().invoke(app, ["--help"]).stdout
    for name in ("probe", "plan", "run", "train", "bench", "demo"):
        assert name in commands
