"""Bad input: each with its own message and exit code 2, before anything is started or written."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tatami.cli.app import app
from tatami.comm import launch
from tatami.errors import TatamiError

BAD_TOML = """
[local]
bandwidth = "fast"
latency = "5 us"

[[processors]]
name = "a"
speed = -1

[[processors]]
name = "a"
sped = 2
"""
WORDS = "aardvark\ta-rdvark\t1<<>2<<>\t0\naback\txb@k-\t0>1<<\t0\n"


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*arguments: object, **named: object) -> int:
        raise AssertionError(f"ranks were started: {arguments} {named}")

    monkeypatch.setattr(launch, "run", refuse)
    monkeypatch.chdir(tmp_path)


def refused(*arguments: str) -> str:
    """The message of a command that must be refused, without a traceback and without a new file."""
    before = sorted(Path().iterdir())
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert not isinstance(result.exception, TatamiError)
    assert sorted(Path().iterdir()) == before
    return result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan"], "which machines? Give a cluster file"),
        (["plan", "--speeds", ""], "speeds: there is none"),
        (["plan", "--speeds", "1,,2"], "speeds[1]: is missing"),
        (["plan", "--speeds", "0,1"], "speeds[0]: must be > 0, not 0"),
        (["plan", "--speeds", "1,-2"], "speeds[1]: must be > 0, not -2"),
        (["plan", "--speeds", "1,nan"], "speeds[1]: must be a finite number > 0, not nan"),
        (["plan", "--speeds", "1,fast"], "speeds[1]: 'fast' is not a computing speed"),
        (
            ["plan", "--speeds", "1,1", "--planner", "best"],
            "there is no planner 'best'; choose one of even, grid, grid-rev, srpm",
        ),
        (["plan", "--speeds", "1,1,1", "--samples", "2"], "3 processors are more than the 2 samples"),
        (["plan", "--speeds", "1,1,1", "--net", "9-2-9"], "3 processors are more than the 2 units"),
        (["plan", "--speeds", "1,1", "--net", "9-2"], "network '9-2' has no hidden layer"),
        (["plan", "--speeds", "1,1", "--plot", "mats.gif"], "a picture is written as .png, .pdf, .svg, not as '.gif'"),
        (["plan", "nowhere.toml"], "cannot read the cluster file nowhere.toml"),
        (["train", "-n", "4", "--speeds", "1,1"], "speeds: 2 given, expected 4, one for each rank"),
        (["train", "-n", "2", "--method", "best"], "there is no method 'best'; choose one of: even, grid, grid-rev, srpm"),
        (["train", "-n", "2", "--backend", "tcp"], "there is no backend 'tcp'; choose one of: mpi,"),
        (["train", "-n", "2", "--backend", "single"], "backend 'single' is one rank, but -n 2 was asked for"),
        (["train", "-n", "2", "--backend", "torchdist"], "backend 'torchdist' is of ranks that torchrun started"),
        (["train", "--data", "mnist"], "there is no data set 'mnist'; choose one of: digits, nettalk"),
        (["train", "--loss", "nll"], "there is no loss 'nll'; choose one of: mse, squared-error, cross-entropy"),
        (["train", "--optimizer", "lbfgs"], "there is no optimizer 'lbfgs'; choose one of: adam, adamw, sgd"),
        (["train", "--momentum", "0.9"], "--momentum is of --optimizer sgd"),
        (["train", "--data", "nettalk"], "nettalk needs its corpus file"),
        (["train", "--net", "63-80-10"], "digits has 64 and 10; write it as 64-...-10"),
        (["train", "-n", "4", "--batch-size", "3"], "4 processors are more than the 3 samples"),
        (["train", "-n", "9", "--net", "64-8-10"], "9 processors are more than the 8 units"),
        (["train", "--emulate"], "--emulate slows the ranks to given speeds, but there are none"),
        (["train", "--speeds", "1,1", "--method", "drpm"], "--method drpm starts from no knowledge of the speeds"),
        (["train", "--speeds", "1,1", "--cluster", "c.toml"], "both say how fast the ranks are; give one of them"),
        (["train", "--load", "nowhere.safetensors"], "cannot read the weights nowhere.safetensors: No such file or directory"),
        (["train", "--plot", "course.gif"], "a picture is written as .png, .pdf, .svg"),
        (["demo", "--speeds", "1,0"], "speeds[1]: must be > 0, not 0"),
        (["bench", "train", "--net", "9-2"], "network '9-2' has no hidden layer"),
        (["probe", "--net", "many"], "network 'many' must be whole numbers"),
    ],
)
def test_is_refused_with_its_own_message(arguments: list[str], said: str) -> None:
    message = refused(*arguments)
    assert message.startswith("error: ")
    assert said in message


def test_all_faults_of_a_cluster_file_are_told_at_once() -> None:
    Path("bad.toml").write_text(BAD_TOML)
    for command in (["plan", "bad.toml"], ["train", "--cluster", "bad.toml"]):
        message = refused(*command)
        for problem in (
            "processors[0].speed: must be > 0, not -1",
            "processors[1].speed: is missing",
            "processors[1].sped: unknown key; did you mean speed?",
            "local.bandwidth: 'fast' is not a bandwidth",
            "processors[1].name: 'a' is taken already, by processors[0]",
        ):
            assert problem in message


def test_a_cluster_file_of_another_number_of_ranks() -> None:
    Path("two.toml").write_text('[[processors]]\nname = "p"\nspeed = 1.0\ncount = 2\n')
    assert "two.toml has 2 processors, but -n 3 was asked for" in refused("train", "--cluster", "two.toml", "-n", "3")


def test_a_cut_nettalk_line_is_named() -> None:
    Path("cut.data").write_text(WORDS + "abacus\t@bxk")
    message = refused("train", "--data", "nettalk", "--nettalk", "cut.data")
    assert "cut.data, line 3: 'abacus' has 2 fields, expected 4" in message


def test_a_checkpoint_of_another_network_names_tensors_and_shapes() -> None:
    made = CliRunner().invoke(app, ["train", "--iterations", "1", "--save", "small.safetensors"])
    assert made.exit_code == 0, made.output
    message = refused("train", "-n", "2", "--load", "small.safetensors", "--net", "64-90-10")
    assert "0.weight has shape (80, 64), this network needs (90, 64)" in message
    assert "2.weight has shape (10, 80), this network needs (10, 90)" in message
    Path("damaged.safetensors").write_bytes(b"not weights")
    assert "damaged.safetensors cannot be read" in refused("train", "--load", "damaged.safetensors")


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--save", "there.safetensors"],
        ["train", "-n", "2", "--log", "there.jsonl"],
        ["train", "--plot", "there.png"],
        ["probe", "-n", "2", "-o", "there.toml"],
        ["plan", "--speeds", "1,1", "--plot", "there.png"],
    ],
)
def test_an_existing_file_is_not_overwritten_without_force(arguments: list[str]) -> None:
    path = Path(arguments[-1])
    path.write_text("mine")
    message = refused(*arguments)
    assert f"{path} exists already" in message
    assert "--force" in message
    assert path.read_text() == "mine"
