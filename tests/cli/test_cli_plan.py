"""`tatami plan`: the table, the records, the picture; and that it answers without torch."""

import codecs
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tatami.cli.app import app
from tatami.cluster import Cluster, read_cluster
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
    assert [record["planner"] for record in answer] == [*PLANNERS, "alone"]
    *answer, alone = answer
    assert alone["replicas"] == [["p3"]]
    assert alone["predicted_s"] >= min(record["predicted_s"] for record in answer)
    assert [record["planner"] for record in answer if record["recommended"]] == ["timed"]
    srpm = next(record for record in answer if record["planner"] == "srpm")
    assert srpm["replicas"] == [["p0", "p1", "p2"], ["p3", "p4"]]
    assert srpm["samples"] == [382, 642]
    assert srpm["units"] == [[17, 21, 42], [40, 40]]
    assert srpm["t_comm"] == pytest.approx(2 * 26 * 1024 * 2 * 1.19 / 3.19 + 2 * (26 + 203) * 80)
    for record in answer:
        assert record["micro_batches"] == [1] * len(record["replicas"])
        assert record["against_alone"] == pytest.approx(alone["predicted_s"] / record["predicted_s"])
        for machine in record["machines"]:
            parts = ("compute_s", "sums_s", "gradients_s", "wait_s")
            assert sum(machine[part] for part in parts) == pytest.approx(record["predicted_s"])
            assert (machine["host"], machine["memory_bytes"] > 0) == ("localhost", True)
        assert isinstance(record["predicted_s"], float)
        assert isinstance(record["gap"], float)
        assert record["predicted_s"] > 0
        assert record["gap"] >= -1e-9


def test_planner_restricts_and_may_be_given_again() -> None:
    answer = records("--speeds", SPEEDS, "--planner", "weighted", "--planner", "even")
    assert [record["planner"] for record in answer] == ["weighted", "even"]
    assert records("--speeds", SPEEDS, "--planner", "weighted, even") == answer
    assert answer[0]["replicas"] == [["p0"], ["p1"], ["p2"], ["p3"], ["p4"]]
    assert [record["recommended"] for record in answer] == [True, False]
    assert not records("--speeds", SPEEDS, "--planner", "weighted")[0]["recommended"], "nothing was compared"


def test_a_cluster_file_gives_names_and_speeds_and_speeds_replace_its_own(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER)
    (own,) = records(str(file), "--planner", "weighted", "--samples", "100")
    assert (own["replicas"], own["samples"]) == ([["old"], ["new"]], [25, 75])
    (given,) = records(str(file), "--planner", "weighted", "--samples", "100", "--speeds", "1,1")
    assert given["samples"] == [50, 50]


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("machines", [5, 64])
def test_no_line_is_cut_or_longer_than_the_terminal(columns: int, machines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    speeds = SPEEDS if machines == 5 else ",".join(str(1 + index % 20) for index in range(machines))
    result = CliRunner().invoke(app, ["plan", "--speeds", speeds, "--all"])
    assert result.exit_code == 0
    assert "…" not in result.stdout
    for planner in PLANNERS.keys() - {"timed", "weighted"}:
        assert planner in result.stdout
    assert "t_comm" not in result.stdout
    if columns >= 80:
        assert max(map(len, result.stdout.splitlines())) <= columns


def test_the_answer_comes_in_an_order_and_the_same_plan_once() -> None:
    result = CliRunner().invoke(app, ["plan", "--speeds", SPEEDS, "--samples", "1024"])
    assert result.exit_code == 0, result.output
    last = "Given --speeds without a cluster file, all 5 ranks are on one host, with 40 Gbit/s and 5 us between them."
    assert " ".join(result.output.split()).endswith(last)
    order = [
        "Recommended: data parallelism over all 5 machines: each computes a share of the 1,024 samples.",
        "In an iteration (█ computes):",
        "p4 ",
        "An iteration takes 24.6 ms: computing 24.6 ms (100 %), gradient sums 33.5 us (under 1 %).",
        "Speeds are relative, and 1 is assumed to be 1 Gflop/s",
        "Comparison for 203-80-26 and 1,024 samples per iteration:",
        "p3 alone",
        "weighted data parallelism,",
    ]
    text = " ".join(result.stdout.split())
    places = [text.find(" ".join(each.split())) for each in order]
    assert -1 not in places
    assert places == sorted(places)
    assert "srpm" not in text
    one = " ".join(CliRunner().invoke(app, ["plan", "--speeds", SPEEDS, "--planner", "even"]).stdout.split())
    assert one.startswith("As asked: data parallelism over all 5 machines")
    assert "as asked, data parallelism" in one
    assert "ecommended" not in one
    several = CliRunner().invoke(app, ["plan", "--speeds", SPEEDS, "--planner", "even,srpm"]).stdout
    assert several.startswith("Recommended: ")
    varied = " ".join(CliRunner().invoke(app, ["plan", "--speeds", SPEEDS, "--vary", "samples=8"]).stdout.split())
    assert varied.endswith(last)
    assert "Speeds are relative, and 1 is assumed to be 1 Gflop/s" in varied


def test_a_terminal_of_no_known_width_and_a_byte_order_mark_are_no_obstacles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "four.toml"
    file.write_bytes(codecs.BOM_UTF8 + FOUR.encode())
    monkeypatch.setenv("COLUMNS", "80")
    known = CliRunner().invoke(app, ["plan", str(file), *GPT])
    monkeypatch.setenv("COLUMNS", "0")
    unknown = CliRunner().invoke(app, ["plan", str(file), *GPT])
    assert (unknown.exit_code, unknown.stdout) == (0, known.stdout)
    assert "Recommended: " in known.stdout


def test_who_has_no_work_and_what_holds_the_others_back_is_said_in_words(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    home = '[[processors]]\nname = "{0}"\nspeed = {1}\nmessage = "{2}"\n'
    machines = [("desktop", 60e9, "30 us"), ("laptop", 50e9, "30 us"), ("old", 1e6, "30 us")]
    file.write_text("".join(home.format(*each) for each in machines) + 'link = "50 Mbit/s"\n')
    result = CliRunner().invoke(app, ["plan", str(file), *GPT, "--samples", "3000"])
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "desktop and laptop" in text
    assert "Without work: old" in text
    assert "leaves out" not in result.output, "the answer says it"
    slow = file.read_text().replace("1000000.0", "50e9")
    file.write_text(slow)
    text = " ".join(CliRunner().invoke(app, ["plan", str(file), *GPT, "--samples", "3000", "--planner", "even"]).stdout.split())
    assert re.search(r"[\d.]+ ms bytes on the link of old \(50 Mbit/s\)", text)


GPT = ("--model", "gpt", "--layers", "2", "--width", "48", "--heads", "6", "--tokens", "16", "--vocabulary", "100")


def test_a_gpt_is_planned_by_its_sizes() -> None:
    answer = records("--speeds", "1,0.5,0.25,1", *GPT, "--samples", "32")
    *answer, staged, _ = answer
    assert [record["planner"] for record in answer] == list(PLANNERS)
    assert not staged["recommended"], "relative speeds say nothing of what sending costs"
    weighted, timed = (next(each for each in answer if each["planner"] == name) for name in ("weighted", "timed"))
    assert weighted["against_weighted"] == 1.0
    assert timed["against_weighted"] >= 1.0
    for record in answer:
        assert sum(record["samples"]) == 32
        assert {sum(replica) for replica in record["units"]} == {192}
        assert record["against_weighted"] == pytest.approx(weighted["predicted_s"] / record["predicted_s"])
        assert set(record["memory_bytes"]) == {"p0", "p1", "p2", "p3"}
    few, many = (records("--speeds", "1", *GPT, "--planner", "timed", "--kv-heads", heads)[0] for heads in ("2", "6"))
    assert few["memory_bytes"]["p0"] < many["memory_bytes"]["p0"]


FOUR = "[network]\nbandwidth = '1 Gbit/s'\nlatency = '50 us'\n" + "".join(
    f"[[processors]]\nname = '{name}'\nspeed = '{speed} Tflop/s'\nmemory = '{memory} GiB'\n"
    for name, speed, memory in (("a", 15, 24), ("b", 15, 24), ("c", 6, 8), ("d", 6, 8))
)


def test_stages_are_recommended_where_they_are_faster(tmp_path: Path) -> None:
    """GPT-2 over two fast and two slow machines: weighted data parallelism takes 7.3 s, one machine alone 3.8 s."""
    file = tmp_path / "four.toml"
    file.write_text(FOUR)
    asked = (str(file), "--model", "gpt", "--samples", "64")
    *_, staged, alone = records(*asked)
    assert staged["recommended"]
    assert (staged["against_weighted"], staged["against_alone"]) == (
        pytest.approx(2.27, abs=0.1),
        pytest.approx(1.16, abs=0.05),
    )
    assert sum(staged["parts_s"].values()) == pytest.approx(staged["predicted_s"])
    assert [each["last_piece"] for each in staged["stages"]][-1] == "ln_f"
    assert "a" in staged["stages"][-1]["processors"], "rank 0 has the loss"
    assert alone["planner"] == "alone"
    shown = CliRunner().invoke(app, ["plan", *asked]).stdout
    assert "Recommended: 2 pipeline stages over a and b: each computes" in shown
    assert "leaves out" not in shown
    for words in ("stage pieces", "wte - h.7.mlp", "recommended, pipeline stages", "1 in 2 stages", "a alone"):
        assert words in shown
    shown = CliRunner().invoke(app, ["plan", *asked, "--stages", "4", "--planner", "even"]).stdout
    assert shown.startswith("As asked: ")
    assert "│" not in shown, "tiles that are not asked for"
    assert "as asked, pipeline stages" in shown
    assert "ecommended" not in shown
    four = records(*asked, "--stages", "4", "--micro-batches", "8")[-2]
    assert not four["recommended"]
    assert (len(four["stages"]), four["micro_batches"]) == (4, [8])
    assert all(record["planner"] != "stages" for record in records(*asked, "--stages", "1"))


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("--stages", "5"), "5 stages are more than the 4 machines"),
        (("--stages", "2", "--micro-batches", "65"), "65 micro-batches are more than the 64 samples"),
        (("--stages", "2", "--net", "203-80-26"), "the pieces of this network are not known"),
    ],
)
def test_stages_that_cannot_be_are_refused_in_one_sentence(asked: tuple[str, ...], told: str, tmp_path: Path) -> None:
    file = tmp_path / "four.toml"
    file.write_text(FOUR)
    model = () if "--net" in asked else ("--model", "gpt")
    result = CliRunner().invoke(app, ["plan", str(file), "--samples", "64", *model, *asked])
    assert result.exit_code != 0
    assert told in " ".join(result.output.split())


def test_the_rule_of_thumb_is_the_last_sentence_where_everything_is_asked_for() -> None:
    result = CliRunner().invoke(app, ["plan", "--speeds", SPEEDS, "--all"])
    last = " ".join(result.stdout.split("\n\n")[-2].split())
    assert last.startswith("Weighted data parallelism does about as well; by the rule of thumb")


def test_memory_used_of_memory_given_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        "".join(f'[[processors]]\nname = "p{index}"\nspeed = 1\nmemory = "{index + 3} MiB"\n' for index in range(2))
    )
    result = CliRunner().invoke(app, ["plan", str(file), *GPT, "--samples", "8"])
    assert result.exit_code == 0, result.output
    assert re.search(r"p0 .* MiB of 3 MiB\n", result.stdout)
    many = CliRunner().invoke(app, ["plan", str(file), *GPT, "--samples", "800"])
    assert many.exit_code == 0, "in micro-batches"
    deep = CliRunner().invoke(app, ["plan", str(file), *GPT, "--layers", "40"])
    assert deep.exit_code == 2
    told = r"with one sample at a time, recomputing all activations: p0 lacks .* would fit with \d+ more machines like p1"
    assert re.search(f"no room for this network, {told}", deep.stderr)


def test_what_is_assumed_of_an_added_machine_is_said(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER.replace("speed = 3.0", 'speed = 3.0\nmessage = "1 ms"'))
    assumed = "Messages and calls are assumed to cost new2-0 what they cost old, nearest in speed, unless given."
    asked = ("plan", str(file), "--add", "speed=1.1,count=2")
    assert records(*asked[1:])[1]["assumed"] == assumed
    assert assumed in " ".join(CliRunner().invoke(app, asked).stdout.split())


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


SMALL = ["--backend", "threads", "--net", "20-16-5", "--samples", "64"]


def test_it_writes_a_cluster_that_plan_reads(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    result = CliRunner().invoke(app, ["probe", "-n", "3", *SMALL, "-o", str(file)])
    assert result.exit_code == 0, result.output
    assert f"written to {file}; next: tatami plan {file} --net 20-16-5 --samples 64" in result.stdout
    cluster = read_cluster(file)
    assert [processor.name for processor in cluster.processors] == ["p0", "p1", "p2"]
    for processor in cluster.processors:
        assert processor.speed > 1e6
        assert processor.spread is not None
        assert processor.memory_bytes is not None
        assert f"{processor.name} " in result.stdout
    assert list(cluster.sample_flop) == ["20-16-5"]
    assert "a sample of 20-16-5 costs " in result.stdout
    planned = CliRunner().invoke(app, ["plan", str(file), "--planner", "weighted", "--json"])
    assert json.loads(planned.stdout)[0]["replicas"] == [["p0"], ["p1"], ["p2"]]


def test_the_record_has_speeds_and_links() -> None:
    result = CliRunner().invoke(app, ["probe", *SMALL, "--json"])
    record = json.loads(result.stdout)
    assert [processor["name"] for processor in record["processors"]] == ["p0", "p1"]
    assert record["sample_flop"]["20-16-5"] >= 0
    (link,) = record["links"]
    assert link["hosts"][0] == link["hosts"][1]
    assert link["latency_s"] >= 0
    assert link["bandwidth_bytes_per_s"] > 0


@pytest.mark.parametrize("columns", [80, 120])
def test_the_tables_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    result = CliRunner().invoke(app, ["probe", "-n", "1", *SMALL[2:]])
    assert result.exit_code == 0, result.output
    assert "assumed: one rank has no link to measure" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= columns


@pytest.mark.parametrize(("spread", "told"), [(0.4, False), (2.3, True)])
def test_speeds_that_strayed_are_told_and_planned_with(
    spread: float, told: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cluster = replace(Cluster.from_speeds([1e10, 2e10]), sample_flop={"20-16-5": 100.0})
    noisy = tuple(replace(each, spread=spread) for each in cluster.processors)
    monkeypatch.setattr("tatami.model.cluster_probe.probe", lambda *_, **__: replace(cluster, processors=noisy))
    file = tmp_path / "cluster.toml"
    result = CliRunner().invoke(app, ["probe", "-n", "1", *SMALL[2:], "-o", str(file)])
    assert result.exit_code == 0, result.output
    assert ("measured speeds varied by 230 %" in result.stderr) is told
    for net in ("20-16-5", "30-8-2"):
        planned = CliRunner().invoke(app, ["plan", str(file), "--net", net, "--json"])
        assert planned.exit_code == 0, planned.stderr
        plans = json.loads(planned.stdout)
        assert all(0 < each["range_s"][0] < each["predicted_s"] < each["range_s"][1] for each in plans)
        measured = "the speeds in" in planned.stderr and "tatami probe --net 30-8-2 measures them" in planned.stderr
        assert measured is (net == "30-8-2")


NETWORK = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 5))

def sample():
    return torch.rand(2, 20)
"""


def test_a_network_in_a_file_is_what_is_timed(tmp_path: Path) -> None:
    network, file = tmp_path / "network.py", tmp_path / "cluster.toml"
    network.write_text(NETWORK)
    options = ["probe", "-n", "2", "--backend", "threads", "--samples", "256", "-o", str(file), "--force"]
    result = CliRunner().invoke(app, [*options, "--model", str(network), "--json"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    read = read_cluster(file).processors
    for processor, told in zip(read, record["processors"], strict=True):
        points = told["speed_by_size"]
        assert float(processor.speed) == told["speed_flop_per_s"] > 0
        assert points is None or [size for size, _ in points] == sorted(size for size, _ in points)
    for text, said in (
        ("sample = 1", "must define build_model and sample; it lacks build_model"),
        ("sample = 1\ndef build_model(): pass", "returned NoneType"),
    ):
        network.write_text(text)
        result = CliRunner().invoke(app, [*options, "--model", str(network)])
        assert result.exit_code != 0
        assert said in result.output + str(result.exception)
