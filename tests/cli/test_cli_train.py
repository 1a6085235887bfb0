"""`tatami train`: what it reports and leaves behind; on one rank, on threads, and as a real MPI job."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from tatami.cli.app import app
from tatami.cli.train_job import TrainJob
from tatami.cli.training import train
from tatami.cli.training_job import prepare
from tatami.comm.threads import run_threads

pytest.importorskip("sklearn")
THREADS = ["--backend", "threads"]


def trained(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["train", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    record = json.loads(line)
    assert isinstance(record, dict)
    return record


def test_digits_are_learnt_with_the_defaults() -> None:
    record = trained()
    assert (record["data"], record["net"], record["ranks"], record["method"]) == ("digits", "64-80-10", 1, "timed")
    assert record["iterations"] == 200
    assert record["accuracy"]["digit"] > 0.95


def test_samples_per_second_are_those_of_batches_of_all_sizes() -> None:
    """20 iterations, 10 of 1,000 samples and 10 of the 438 that are left of an epoch."""
    record = trained("--iterations", "20", "--batch-size", "1000")
    assert record["samples_per_s"] == pytest.approx(10 * 1438 / record["seconds"])


def test_every_method_ends_with_the_loss_of_one_rank() -> None:
    alone = trained("--iterations", "30")
    for method in ("even", "grid-rev", "srpm", "weighted", "timed"):
        record = trained("--iterations", "30", "-n", "3", "--speeds", "1,2,3", "--method", method, *THREADS)
        assert record["loss"] == pytest.approx(alone["loss"], rel=1e-4)
        assert record["accuracy"] == pytest.approx(alone["accuracy"], abs=0.01)
        assert {name for replica in record["replicas"] for name in replica} == {"p0", "p1", "p2"}


@pytest.mark.parametrize("model", [[], ["--model", "cnn"]])
def test_more_ranks_than_samples_have_the_loss_of_one_rank(model: list[str]) -> None:
    asked = (*model, "--batch-size", "3", "--iterations", "2")
    alone, shared = trained(*asked), trained(*asked, "-n", "4", *THREADS)
    assert shared["loss"] == pytest.approx(alone["loss"], rel=1e-4)


def test_a_gpt_on_a_text_has_the_losses_of_one_rank(tmp_path: Path) -> None:
    text, weights, log = tmp_path / "text.txt", tmp_path / "gpt.safetensors", tmp_path / "gpt.jsonl"
    text.write_text("abc, äöü! " * 60)
    sizes: dict[str, Any] = {"layers": 1, "width": 12, "heads": 3, "tokens": 8, "batch_size": 4, "iterations": 2}
    options = [word for name, size in sizes.items() for word in (f"--{name.replace('_', '-')}", str(size))]
    told = trained("--model", "gpt", "--text", str(text), *options, "--save", str(weights), "--log", str(log))
    assert json.loads(log.read_text().splitlines()[0])["data"] == "text"
    assert (told["data"], told["net"]) == ("text", "gpt 1x12, 3 heads, 8 tokens")
    assert set(told["accuracy"]) == {"character"}
    assert load_file(weights)["head.weight"].shape == (9, 12)
    job = TrainJob(model="gpt", text=text, **sizes)
    (alone,) = run_threads(partial(train, prepare(job)), size=1)
    assert alone.loss == pytest.approx(told["loss"], rel=1e-6)
    for method, replicas in (("even", [["p0"], ["p1"]]), ("srpm", [["p0", "p1"]])):
        prepared = prepare(replace(job, speeds="1,1", method=method))
        for outcome in run_threads(partial(train, prepared), size=2):
            assert [[tile.processor for tile in replica] for replica in outcome.tiling.replicas] == replicas
            assert outcome.history.losses == pytest.approx(alone.history.losses, rel=1e-5)
            assert outcome.loss == pytest.approx(alone.loss, rel=1e-5)
            assert outcome.accuracy == pytest.approx(alone.accuracy)


def test_pipeline_stages_end_with_the_loss_of_one_rank() -> None:
    asked = ("--iterations", "8")
    alone, staged = trained(*asked), trained(*asked, "-n", "2", "--stages", "2", "--micro-batches", "3", *THREADS)
    assert staged["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    assert staged["accuracy"] == pytest.approx(alone["accuracy"], abs=0.01)
    assert {each["rank"]: each["micro_batches"] for each in staged["stages"]["ranks"]} == {"p0": 3, "p1": 3}


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        (["-n", "2", "--stages", "3"], "--stages 3 needs as many ranks, and there are 2"),
        (["-n", "2", "--batch-size", "4", "--micro-batches", "5"], "--micro-batches 5 are more than the 4 samples of a batch"),
        (["-n", "2", "--stages", "2", "--method", "srpm"], "by the least predicted time"),
    ],
)
def test_stages_that_cannot_be_are_one_sentence(asked: list[str], match: str) -> None:
    result = CliRunner().invoke(app, ["train", *asked, *THREADS])
    assert result.exit_code != 0
    assert match in " ".join(result.output.replace("│", " ").split())


def test_a_cnn_learns_digits_and_has_the_losses_of_one_rank() -> None:
    options = ("--model", "cnn", "--layers", "1", "--width", "8", "--batch-size", "8", "--samples", "80")
    alone = trained(*options, "--speeds", "1", "--iterations", "2")
    assert (alone["data"], alone["net"]) == ("digits", "cnn 1x8")
    two = trained(*options, "-n", "2", "--speeds", "1,1", "--iterations", "2", *THREADS)
    assert two["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert trained(*options, "--speeds", "1", "--iterations", "40")["loss"] < 0.7 * alone["loss"]


def test_the_model_mlp_is_the_network_without_a_model() -> None:
    assert trained("--model", "mlp", "--iterations", "2")["loss"] == trained("--iterations", "2")["loss"]


def test_given_speeds_are_what_the_planner_believes() -> None:
    record = trained("--iterations", "2", "--speeds", "1,3", "--method", "weighted", *THREADS)
    assert record["ranks"] == 2
    assert record["replicas"] == [["p0"], ["p1"]]
    assert record["samples"] == [360, 1078]
    assert record["speeds"] == {"p0": 1.0, "p1": 3.0}


def test_drpm_checks_every_20_iterations_and_changes_no_result() -> None:
    """What it decides depends on times, and is tested with a fake clock in tests/train."""
    options = ("--net", "64-100-10", "--iterations", "60", "--speeds", "1,0.2", "--emulate", *THREADS)
    record = trained(*options, "--method", "drpm")
    assert [check["iteration"] for check in record["checks"]] == [20, 40, 60]
    assert all(check["reason"].startswith(f"check {number} (") for number, check in enumerate(record["checks"], start=1))
    assert record["loss"] == pytest.approx(trained(*options, "--method", "even")["loss"], rel=1e-4)


def test_weights_log_and_picture_are_left_behind(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    weights, log, plot = tmp_path / "model.safetensors", tmp_path / "run.jsonl", tmp_path / "course.png"
    outputs = ["--save", str(weights), "--log", str(log), "--plot", str(plot)]
    record = trained("--iterations", "20", "-n", "2", *THREADS, *outputs)
    assert {name: tuple(tensor.shape) for name, tensor in load_file(weights).items()} == {
        "0.weight": (80, 64),
        "0.bias": (80,),
        "2.weight": (10, 80),
        "2.bias": (10,),
    }
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[0] == {
        "event": "settings",
        "data": "digits",
        "shifts": False,
        "ranks": 2,
        "emulate": False,
        "method": "timed",
        "retile": False,
        "backend": "threads",
        "device": "cpu",
        "optimizer": "adam",
        "iterations": 20,
        "seed": 0,
        "save": str(weights),
        "log": str(log),
        "plot": str(plot),
        "force": False,
        "as_json": True,
    }
    assert [line["iteration"] for line in lines if line["event"] == "train"] == [10, 20]
    assert plot.read_bytes().startswith(b"\x89PNG")
    onward = trained("--iterations", "1", "--load", str(weights))
    assert onward["loss"] < record["loss"]
    assert CliRunner().invoke(app, ["train", "--iterations", "1", *outputs, "--force"]).exit_code == 0


def test_it_stops_when_the_loss_is_low_enough() -> None:
    record = trained("--stop-below", "1.0")
    assert record["stopped"] == "loss"
    assert record["iterations"] < 100
    assert record["loss"] < 1.0


def test_nettalk_from_a_file(tmp_path: Path) -> None:
    words = tmp_path / "words.data"
    words.write_text("aardvark\ta-rdvark\t1<<>2<<>\t0\naback\txb@k-\t0>1<<\t0\nabacus\t@bxkxs\t1<0>0<\t0\n")
    record = trained("--data", "nettalk", "--nettalk", str(words), "--samples", "19", "--iterations", "300")
    assert record["net"] == "203-80-26"
    assert record["accuracy"]["phoneme"] > 0.9
    assert set(record["accuracy"]) == {"phoneme", "stress"}


def test_the_report_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, ["train", "--iterations", "2", "-n", "2", *THREADS])
    assert result.exit_code == 0
    for what in ("loss", "accuracy", "samples/s", "iteration", "digits 64-80-10, 2 ranks, timed", "│"):
        assert what in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_the_last_good_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    diverging = ["train", "-n", "2", *THREADS, "--optimizer", "sgd", "--lr", "1e38", "--save", "out/model.safetensors"]
    result = CliRunner().invoke(app, diverging)
    assert result.exit_code == 1
    assert "error: the loss is" in result.stderr
    assert "on rank 0 of 2" in result.stderr
    assert "Traceback" not in result.stderr
    (rescued,) = Path("out").iterdir()
    assert rescued.name.startswith("last-good-")
    assert rescued.name in result.stderr
    assert load_file(rescued)["0.weight"].isfinite().all()


def test_a_real_mpi_job_that_diverges_says_so_once(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    done = subprocess.run(
        [sys.executable, "-m", "tatami", "train", "-n", "2", "--optimizer", "sgd", "--lr", "1e38"],
        cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stderr.count("error: the loss is") == 1
    assert "Traceback" not in done.stderr
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]
