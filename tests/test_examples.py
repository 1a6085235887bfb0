"""The examples run as their first lines say, and do what they promise."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

HANGS_AFTER_S = 850
"""An example takes seconds of two cores that have nothing else to do."""
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An example that leaves nothing behind but what it overwrites runs as often as one likes."""
    monkeypatch.chdir(tmp_path)
    yield
    assert {path.name for path in tmp_path.iterdir()} <= {"model.safetensors"}


def run(example: str, *, ranks: int, timeout_s: float = HANGS_AFTER_S) -> str:
    command = [sys.executable, "-m", "tatami", "run", "-n", str(ranks), str(EXAMPLES / example)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ten_lines_learn_the_digits(ranks: int) -> None:
    accuracy = re.search(r"accuracy ([\d.]+)%", run("ten_lines.py", ranks=ranks))
    assert accuracy is not None
    assert float(accuracy[1]) > 95
    assert load_file("model.safetensors")["0.weight"].shape == (200, 64)


def test_ten_lines_run_twice_in_a_row() -> None:
    """In this process, to be quick; what an earlier run has saved is overwritten."""
    for _ in range(2):
        Path("model.safetensors").write_bytes(b"of an earlier run")
        runpy.run_path(str(EXAMPLES / "ten_lines.py"))
        assert load_file("model.safetensors")["0.weight"].shape == (200, 64)


def test_a_run_is_repaired_and_learns_the_digits() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    command = [sys.executable, "-m", "tatami", "run", "--elastic", "-n", "3", str(EXAMPLES / "repair.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_AFTER_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    sizes = re.findall(r"step (\d+): loss [\d.]+ on (\d) ranks", done.stdout)
    assert sizes == [("10", "3"), ("20", "3"), ("30", "2"), ("40", "2")]
    assert re.search(r"p1 died: step 20 is done again, 2 ranks go on", done.stderr)
    accuracy = re.search(r"digit ([\d.]+)%", done.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) > 95


def test_own_loop_learns_the_digits_and_saves_the_weights() -> None:
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", run("own_loop.py", ranks=2), flags=re.MULTILINE)]
    assert len(losses) == 5
    assert losses[-1] < 0.5  # log(10 digits) is 2.3
    assert load_file("model.safetensors")["0.weight"].shape == (200, 64)


def test_a_gpt_learns_the_language_reference() -> None:
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", run("nanogpt.py", ranks=2), flags=re.MULTILINE)]
    assert len(losses) == 3
    assert losses[-1] < 3.2  # log(100 letters) is 4.6


def test_a_gpt2_of_hugging_face_learns_the_language_reference() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    said = run("huggingface.py", ranks=2)
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", said, flags=re.MULTILINE)]
    assert len(losses) == 3
    assert losses[-1] < 3.2  # log(100 letters) is 4.6


def test_a_resnet_learns_directions() -> None:
    accuracy = re.search(r"^accuracy ([\d.]+)%", run("resnet.py", ranks=2), flags=re.MULTILINE)
    assert accuracy is not None
    assert float(accuracy[1]) > 90


@pytest.mark.parametrize("launcher", ["tatami run", "torchrun"])
def test_data_parallel_learns_the_digits_however_it_is_started(launcher: str) -> None:
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command.append(str(EXAMPLES / "data_parallel.py"))
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_AFTER_S, check=False)
        assert done.returncode == 0, done.stderr
        said = done.stdout
    else:
        said = run("data_parallel.py", ranks=2)
    accuracy = re.search(r"accuracy ([\d.]+)%", said)
    assert accuracy is not None
    assert float(accuracy[1]) > 95


@pytest.mark.parametrize(
    ("example", "ranks"), [("model_parallel.py", 2), ("dual_parallel.py", 4), ("parallel_convolution.py", 2)]
)
def test_networks_that_span_ranks_learn_the_digits(example: str, ranks: int) -> None:
    accuracy = re.search(r"accuracy ([\d.]+)%", run(example, ranks=ranks))
    assert accuracy is not None
    assert float(accuracy[1]) > 95


def test_seq2seq_translates_numbers_it_has_not_seen_both_ways() -> None:
    said = run("seq2seq.py", ranks=2)
    exact = re.findall(r"^(.+): ([\d.]+)% of 1000 unseen numbers exact", said, flags=re.MULTILINE)
    assert [way for way, _ in exact] == ["digits to words", "words to digits"]
    assert min(float(share) for _, share in exact) > 95


@pytest.mark.parametrize("example", ["dual_parallel.py", "seq2seq.py"])
def test_networks_for_other_numbers_of_ranks_say_so(example: str) -> None:
    command = [sys.executable, str(EXAMPLES / example)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_AFTER_S, check=False)
    assert done.returncode == 1
    assert "2 ranks" in done.stderr
    assert "not 1" in done.stderr


def test_an_ensemble_is_better_than_its_members() -> None:
    said = run("ensemble.py", ranks=3)
    members = [float(each) for each in re.findall(r"^member \d: accuracy ([\d.]+)%", said, flags=re.MULTILINE)]
    together = re.search(r"^ensemble of 3: accuracy ([\d.]+)%", said, flags=re.MULTILINE)
    assert len(members) == 3
    assert together is not None
    assert float(together[1]) > sum(members) / 3


def test_a_mixture_of_experts_learns_and_uses_all_of_them() -> None:
    said = re.search(r"serve (.+) of the samples; accuracy ([\d.]+)%", run("mixture_of_experts.py", ranks=2))
    assert said is not None
    shares = [int(each.rstrip("%")) for each in said[1].split(", ")]
    assert len(shares) == 2
    assert min(shares) > 10
    assert float(said[2]) > 93
