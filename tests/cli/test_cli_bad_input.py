"""Bad input: each with its own message and exit code 2, before anything is started or written."""

import os
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from fuzz_inputs import commands
from typer.models import OptionInfo
from typer.testing import CliRunner

from tatami.cli.app import app
from tatami.cli.options import finite
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
        (["plan", "--speeds", "1,5e11"], "speeds[0]: 1 flop/s next to 500 Gflop/s: write '1 Gflop/s' or another unit"),
        (["plan", "--speeds", "1,fast"], "speeds[1]: 'fast' is not a computing speed"),
        (
            ["plan", "--speeds", "1,1", "--planner", "best"],
            "there is no planner 'best'; choose one of even, grid, grid-rev, srpm",
        ),
        (["plan", "--speeds", "1,1", "--model", "cnn"], "there is no model 'cnn' here; choose gpt"),
        (
            ["plan", "--speeds", "1,1", "--model", "my.py"],
            "planned in Python: tatami.plan(network, cluster=..., batch_size=...",
        ),
        (["plan", "--speeds", "1,1", "--model", "gpt", "--heads", "5"], "a width of 768 does not divide by 5 heads"),
        (
            ["plan", "--speeds", "1,1", "--layers", "6"],
            "--layers: options of a GPT, and the network is 203-80-26; give --model",
        ),
        (["plan", "--speeds", "1,1", "--net", "9-3-2", "--model", "gpt"], "--net 9-3-2 and --model gpt are two networks"),
        (["plan", "--speeds", "1,2", "--add", "name=p1,speed=1"], "name: 'p1' is taken already"),
        (["simulate", "tiling", "--speeds", "1,2", "--mtbf", "1h", "--stages", "2"], "--stages is not simulated together with"),
        (["plan", "--speeds", "1e9,2e9", "--add", "speed=30"], "speed: 30 flop/s next to 2 Gflop/s: write '30 Gflop/s'"),
        (
            ["plan", "--speeds", "1e9,2e9", "--vary", "processors.p1.memory=16"],
            "memory: 16 without a unit is 16 bytes",
        ),
        (["plan", "--speeds", "1,1", "--net", "9-2"], "network '9-2' has no hidden layer"),
        (["plan", "--speeds", "1,1", "--plot", "mats.gif"], "a picture is written as .png, .pdf, .svg, not as '.gif'"),
        (["plan", "nowhere.toml"], "cannot read the cluster file nowhere.toml"),
        (["train", "-n", "4", "--speeds", "1,1"], "speeds: 2 given, expected 4, one for each rank"),
        (["train", "-n", "2", "--method", "best"], "there is no method 'best'; choose one of: even, grid, grid-rev, srpm"),
        (["train", "-n", "2", "--backend", "udp"], "there is no backend 'udp'; choose one of: mpi,"),
        (["train", "-n", "2", "--backend", "single"], "backend 'single' is one rank, but -n 2 was asked for"),
        (["train", "-n", "2", "--backend", "tcp"], "backend 'tcp' is for ranks started by torchrun"),
        (["train", "--data", "mnist"], "there is no data set 'mnist'; choose one of: digits, nettalk"),
        (["train", "--loss", "nll"], "there is no loss 'nll'; choose one of: mse, squared-error, cross-entropy"),
        (["train", "--optimizer", "lbfgs"], "there is no optimizer 'lbfgs'; choose one of: adam, adamw, sgd"),
        (["train", "--momentum", "0.9"], "--momentum is for --optimizer sgd"),
        (["train", "--data", "nettalk"], "nettalk needs its corpus file"),
        (["train", "--net", "63-80-10"], "digits has 64 and 10; write it as 64-...-10"),
        (["train", "--model", "rnn"], "there is no model 'rnn'; choose one of: gpt, mlp, cnn"),
        (["train", "--model", "gpt", "--net", "64-80-10"], "--net is a perceptron, the model if none is given, but --model"),
        (["train", "--model", "mlp", "--net", "64-80-10"], "--net is a perceptron, the model if none is given, but --model"),
        (["train", "--text", "nowhere.txt"], "--text is for --model gpt, but there is no --model; leave one of them out"),
        (["train", "--model", "cnn", "--heads", "2"], "--heads is for --model gpt, but --model cnn was given"),
        (["train", "--model", "gpt", "--data", "digits"], "--data is for --model mlp or cnn, but --model gpt was given"),
        (["train", "--model", "gpt", "--loss", "mse"], "--loss is for --model mlp, but --model gpt was given"),
        (["train", "--model", "cnn", "--data", "nettalk"], "--model cnn trains on the images of digits, not on --data nettalk"),
        (["train", "--model", "gpt", "--heads", "5"], "a width of 48 does not divide by 5 heads; make --width (by default 48)"),
        (["train", "--model", "gpt", "--text", "nowhere.txt"], "cannot read the text nowhere.txt: No such file or directory"),
        (["train", "--model", "gpt", "--text", "/dev/zero"], "cannot read the text /dev/zero: it is a device"),
        (["train", "--model", "gpt", "--text", "."], "cannot read the text .: it is a directory; give a regular file"),
        (["train", "--model", "gpt", "--tokens", "100000"], "10 sequences of 100,000 tokens need 1,000,001; give a"),
        (["train", "--model", "gpt", "--samples", "1000000"], "text: cannot draw 1000000 samples, there are"),
        (["train", "--model", "gpt", "--width", "100000", "--heads", "1"], "the weights of --model gpt take"),
        (["train", "--model", "cnn", "--width", "100000", "--layers", "2"], "the weights of --model cnn take"),
        (["train", "--emulate"], "--emulate slows the ranks to given speeds, but there are none"),
        (["train", "--speeds", "1,1", "--method", "drpm"], "--method drpm starts without known speeds"),
        (["train", "--speeds", "1,1", "--cluster", "c.toml"], "both give the speeds of the ranks; give one of them"),
        (["train", "--load", "nowhere.safetensors"], "cannot read the weights nowhere.safetensors: No such file or directory"),
        (["train", "--load", "/dev/zero"], "cannot read the weights /dev/zero: it is a device; give a regular file"),
        (["train", "--data", "nettalk", "--nettalk", "/dev/zero"], "cannot read the NETtalk file /dev/zero: it is a device"),
        (["train", "--net", "64-999999999-10"], "the weights of --net 64-999999999-10 take 279 GiB, and this machine has"),
        (["train", "--net", "-".join(["64", *["2"] * 2000, "10"])], "has 2002 sizes; at most 1000"),
        (["train", "--net", "64-" + "9" * 5000 + "-10"], "must be whole numbers >= 1 of at most 9 digits, joined by '-'"),
        (
            ["train", "--backend", "threads", "--hosts", "a,b", "-n", "2"],
            "--hosts a,b starts ranks on other machines, but backend",
        ),
        (
            ["train", "--backend", "single", "--hosts", "a"],
            "--hosts a starts ranks on other machines, but backend 'single' runs",
        ),
        (["probe", "--backend", "threads", "-n", "300"], "300 ranks are too many threads for one process; at most 256"),
        (
            ["train", "--emulate", "--speeds", "1,1e-9"],
            "the speeds to emulate differ by a factor of 1e+09; a rank cannot be slowed",
        ),
        (["train", "--save", "/dev/full", "--force"], "/dev/full is a device, and only a regular file can be replaced"),
        (
            ["train", "--save", "there.txt"],
            "--save there.txt is written in the format of safetensors: give it a name",
        ),
        (
            ["train", "--save", "a.safetensors", "--log", "./a.safetensors"],
            "--save and --log both name a.safetensors: give",
        ),
        (["train", "--log", "a.png", "--plot", "a.png"], "--log and --plot both name a.png: give each its own file"),
        (["train", "--log", "/proc/there.jsonl"], "/proc/there.jsonl cannot be written"),
        (["train", "--plot", "/proc/there.png"], "/proc/there.png cannot be written"),
        (["train", "--tensorboard", "/dev/null"], "/dev/null is a device, but a folder is needed; choose another name"),
        (["probe", "-o", "/proc/there.toml"], "/proc/there.toml cannot be written"),
        (["probe", "-o", "n" * 10_000_000], "nnn cannot be written: File name too long"),
        (["plan", "--speeds", "1,1", "--plot", "nowhere/there.png"], "there is no folder nowhere. Make it first"),
        (["demo", "--out", "/dev/null"], "/dev/null is a device, but a folder is needed"),
        (["plan", "--speeds", "1e308,1e308"], "speeds[1]: must be from 1e-12 to 1e+24, not 1e+308"),
        (["plan", "--speeds", "1,1", "--samples", "1" + "0" * 30], "a workload has at most 1,000,000,000,000 samples"),
        (["plan", "/dev/zero"], "cannot read the cluster file /dev/zero: it is a device; give a regular file"),
        (["simulate", "platform", "/dev/zero"], "cannot read the platform file /dev/zero: it is a device"),
        (["simulate", "platform", "--preset", "oakforest-like", "--latency", "1e308"], "--latency: must be at most 31,710 y"),
        (
            ["simulate", "platform", "--preset", "oakforest-like", "--latency", "1 w"],
            "the latency of a link must be at most 60 s",
        ),
        (
            ["simulate", "platform", "--preset", "oakforest-like", "--nodes", "1000000000"],
            "a fat tree has 1 to 200,000 nodes, not",
        ),
        (
            ["simulate", "allreduce", "--preset", "oakforest-like", "--sizes", "1e30 GB"],
            "--sizes: must be at most 8,192 PiB, not",
        ),
        (["bench", "allreduce", "--sizes", "1e30 GB"], "--sizes: must be at most 8,192 PiB, not '1e30 GB'"),
        (["server", "report", "/dev/zero"], "cannot read the report /dev/zero: it is a device"),
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


@pytest.mark.parametrize("arguments", [["plan", "--speeds", "1,1", "--samples", "0"], ["probe", "-n", "0"]])
def test_a_number_out_of_range_is_shown(arguments: list[str]) -> None:
    assert "greater than or equal to 1, not 0" in " ".join(refused(*arguments).replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--stop-below", "nan"], "Invalid value for '--stop-below': must be a finite number, not nan"),
        (["train", "--stop-below", "inf"], "Invalid value for '--stop-below': must be a finite number, not inf"),
        (["train", "--lr", "inf"], "Invalid value for '--lr': must be a finite number, not inf"),
        (["train", "--seed", "-1"], "Invalid value for '--seed': Input should be greater than or equal to 0"),
        (
            ["train", "--seed", str(2**64)],
            "Invalid value for '--seed': Input should be less than or equal to 18446744073709551615",
        ),
        (["train", "-n", "100000"], "Invalid value for '-n' / '--ranks': Input should be less than or equal to 4096"),
        (["simulate", "server", "--task", "nan"], "Invalid value for '--task': must be a finite number, not nan"),
        (["lab", "check", "c.toml", "--cores", "nan"], "Invalid value for '--cores': must be a finite number, not nan"),
    ],
)
def test_an_option_that_is_no_such_number_is_named(arguments: list[str], said: str) -> None:
    assert said in " ".join(refused(*arguments).replace("│", " ").split())


def test_every_option_with_a_point_refuses_what_is_not_finite() -> None:
    """So that no new one is forgotten."""
    checked: set[str] = set()
    unchecked: set[str] = set()
    for name, callback in commands(app):
        for option, hint in get_type_hints(callback, include_extras=True).items():
            kinds = get_args(hint)
            if kinds and float in (kinds[0], *get_args(kinds[0])):
                is_checked = any(isinstance(each, OptionInfo) and each.callback is finite for each in kinds[1:])
                (checked if is_checked else unchecked).add(f"{name} {option}")
    assert unchecked == set()
    assert {"train lr", "train stop_below", "simulate server task", "lab run cores", "bench allreduce seconds"} <= checked


def test_a_lab_uses_no_more_cores_than_there_are() -> None:
    Path("c.toml").write_text('[[processors]]\nname = "p"\nspeed = 1.0\nhost = "h"\n')
    available = len(os.sched_getaffinity(0))
    message = refused("lab", "check", "c.toml", "--cores", "1e9")
    assert f"a lab may use at most the {available} cores that this process has, not 1e+09" in message


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


def test_a_text_that_is_too_short_or_none_is_refused() -> None:
    Path("short.txt").write_text("a" * 320)
    os.mkfifo("pipe.txt")
    Path("bytes.txt").write_bytes(b"text \xff")
    for name, said in (
        ("short.txt", "short.txt has 320 characters, and 10 sequences of 32 tokens need 321; give a longer text, or fewer"),
        ("pipe.txt", "cannot read the text pipe.txt: it is a FIFO; give a regular file"),
        ("bytes.txt", "cannot read the text bytes.txt: it is not text in UTF-8 (byte 5)"),
    ):
        assert said in refused("train", "--model", "gpt", "--text", name)


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
