"""What a user of the lab writes and reads: events, refusals, and labs that are not there."""

import json
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tatami.cli.app import app
from tatami.errors import InputError, LabError
from tatami.lab import Lab, LabEvent, check, lab_state, missing, needs, parse_event, running_lab
from tatami.lab.check import Finding
from tatami.lab.launched_job import mpi_command

from lab_rig import CLUSTER, CLUSTER_TOML  # isort: skip


@pytest.mark.parametrize(
    ("text", "event"),
    [
        ("20s kill h3", LabEvent(at_s=20.0, verb="kill", host="h3")),
        ("1min cut h1", LabEvent(at_s=60.0, verb="cut", host="h1")),
        ("0.5 mend h1", LabEvent(at_s=0.5, verb="mend", host="h1")),
        ("5s speed h3 0.25", LabEvent(at_s=5.0, verb="speed", host="h3", value=0.25)),
        ("5s rate h3 100Mbit/s", LabEvent(at_s=5.0, verb="rate", host="h3", value=12.5e6)),
    ],
)
def test_events(text: str, event: LabEvent) -> None:
    assert parse_event(text) == event


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not an event; write one of: TIME kill HOST"),
        ("20s kill", "is not an event"),
        ("20s kill h3 h4", "is not an event"),
        ("20s burn h3", "is not an event"),
        ("20s speed h3", "is not an event"),
        ("soon kill h3", "'soon' is not a duration"),
        ("20s speed h3 0", "must be > 0"),
        ("20s rate h3 0", "a rate must be > 0; to have none, cut the host"),
        ("20s rate h3 fast", "'fast' is not a bandwidth"),
    ],
)
def test_events_that_cannot_be(text: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        parse_event(text)


def test_the_command_line_reads_events_with_and_without_quotes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER_TOML)
    monkeypatch.chdir(tmp_path)
    seen: dict[str, object] = {}

    def enter(lab: Lab) -> Lab:
        return lab

    def run(_lab: Lab, command: list[str], **others: object) -> int:
        seen.update(others, command=command)
        return 7

    monkeypatch.setattr(Lab, "__enter__", enter)
    monkeypatch.setattr(Lab, "__exit__", lambda *_: None)
    monkeypatch.setattr(Lab, "run", run)
    words = ["--at", "2s", "speed", "h3", "0.2", "--at", "3s kill h3", "--cores", "1", "--", "python", "x.py", "--at", "1"]
    result = CliRunner().invoke(app, ["lab", "run", "cluster.toml", *words])
    assert result.exit_code == 7
    assert seen["command"] == ["python", "x.py", "--at", "1"]
    assert seen["events"] == [parse_event("2s speed h3 0.2"), parse_event("3s kill h3")]
    assert "all together are 0.9 of 1 cores" in result.output


def test_without_root_one_sentence_says_what_works_instead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER_TOML)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    result = CliRunner().invoke(app, ["lab", "run", str(tmp_path / "cluster.toml"), "--", "true"])
    assert result.exit_code == 1
    assert "a lab needs root" in result.output
    assert "tatami.testing.Slowdown" in result.output


def test_on_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert missing() == "a lab is made of Linux's network namespaces and control groups, and this is darwin"
    with pytest.raises(LabError, match=r"this is darwin\. Without a lab, tatami\.testing\.Slowdown"):
        needs.require_lab()


def test_without_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert missing() == "a lab needs the programs ip and tc: apt-get install iproute2"


def test_a_cluster_that_cannot_be_a_lab_is_refused_before_anything(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('[[processors]]\nname = "a"\nspeed = 1.0\nhost = "localhost"\n')
    result = CliRunner().invoke(app, ["lab", "check", str(path)])
    assert result.exit_code == 2
    assert "host 'localhost'" in result.output


def test_nothing_to_run(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    with pytest.raises(InputError, match="nothing to run"):
        mpi_command([], hosts=["h1"], folder=tmp_path)


def test_a_script_loads_torch_before_its_quota_begins(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    (tmp_path / "train.py").touch()
    words = mpi_command(["python", str(tmp_path / "train.py"), "-x"], hosts=["h1", "h2", "h1"], folder=tmp_path)
    assert words[words.index("-hosts") + 1] == "h1,h2,h1"
    assert words[words.index("-n") + 1] == "3"
    assert words[-4:] == ["tatami.lab.rank", str(tmp_path), str(tmp_path / "train.py"), "-x"]


def test_which_lab_a_shell_means(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lab_state, "STATES", tmp_path)
    with pytest.raises(InputError, match="no lab is running"):
        running_lab("h1")
    ours = lab_state.new_state(["h1", "h2"])
    assert running_lab("h1") == ours
    assert lab_state.known_labs() == [ours]
    with pytest.raises(InputError, match="no running lab has a host 'h9'; there are tatami-"):
        running_lab("h9")
    other = lab_state.new_state(["h1"])
    with pytest.raises(InputError, match="several labs have a host 'h1'; say which: --lab tatami-"):
        running_lab("h1")
    assert running_lab("h1", name=other.name) == other
    for each in (ours, other):
        os.rmdir(each.folder)


def test_a_lab_whose_process_is_gone_does_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lab_state, "STATES", tmp_path)
    lab = lab_state.new_state(["h1"])
    os.rmdir(lab.folder)
    path = tmp_path / f"{lab.name}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "owner_started": lab.owner_started + 1}))
    (known,) = lab_state.known_labs()
    assert lab.is_running
    assert not known.is_running  # the number of its process is another one's by now


def test_a_state_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lab_state, "STATES", tmp_path)
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(LabError, match="does not describe a lab"):
        lab_state.known_labs()


@pytest.mark.parametrize(("got", "holds"), [(1.099, True), (0.901, True), (1.101, False), (0.899, False)])
def test_ten_percent(got: float, holds: bool) -> None:
    assert Finding(kind="speed", name="p", asked=1.0, got=got).holds is holds


def test_what_was_measured_is_held_against_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter([[400, 400, 200], [100, 300, 600], [500, 390, 210]])
    rates = iter([12e6, 99e6, 13e6] * 2 + [9e6, 10e6, 1e6])
    asked_of: list[tuple[str, str, float]] = []

    def transfer(_: Lab, one: str, other: str, *, asked: float) -> float:
        asked_of.append((one, other, asked))
        return next(rates)

    monkeypatch.setattr(check, "_compute_on_all", lambda _: next(rounds))
    monkeypatch.setattr(check, "_transfer", transfer)
    found = check.check_lab(Lab(CLUSTER, cores=1.0))
    assert [(each.kind, each.name, each.asked) for each in found] == [
        *(("speed", f"p{number}", speed) for number, speed in ((1, 1.0), (2, 1.0), (3, 0.5))),
        *(("rate", f"{one} -> {other}", 12.5e6) for one, other in (("h1", "h2"), ("h2", "h3"), ("h3", "h1"))),
    ]
    # Medians of three: a processor's part of what all did at once, of a speed of 2.5 together; and bytes a second.
    assert [each.got for each in found] == pytest.approx([1.0, 2.5 * 39 / 110, 0.5, 13e6, 13e6, 9e6])
    assert [each.holds for each in found] == [True, False, True, True, True, False]
    assert asked_of == [pair for pair in (("h1", "h2", 12.5e6), ("h2", "h3", 12.5e6), ("h3", "h1", 12.5e6)) for _ in range(3)]


def test_what_a_lab_would_be_is_known_before_it_is_built() -> None:
    assert Lab(CLUSTER, cores=1.0).plan.quotas == pytest.approx((0.36, 0.36, 0.18))
