"""The examples run as their first lines say, and do what they promise."""

import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
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


def run(example: str, *options: str, ranks: int, timeout_s: float = HANGS_AFTER_S) -> str:
    command = [sys.executable, "-m", "tatami", "run", "-n", str(ranks), str(EXAMPLES / example), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("example", "ranks", "least"),
    [
        *(("ten_lines.py", ranks, 95) for ranks in (1, 3)),
        ("data_parallel.py", 2, 95),
        ("resnet.py", 2, 90),
        ("model_parallel.py", 2, 95),
        ("dual_parallel.py", 4, 95),
        ("parallel_convolution.py", 2, 95),
    ],
)
def test_what_is_learnt_is_learnt_well(example: str, ranks: int, least: float) -> None:
    accuracy = re.search(r"accuracy ([\d.]+)%", run(example, ranks=ranks))
    assert accuracy is not None
    assert float(accuracy[1]) > least
    assert example != "ten_lines.py" or load_file("model.safetensors")["0.weight"].shape == (200, 64)


def test_data_parallel_learns_the_digits_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command.append(str(EXAMPLES / "data_parallel.py"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_AFTER_S, check=False)
    assert done.returncode == 0, done.stderr
    accuracy = re.search(r"accuracy ([\d.]+)%", done.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) > 95


@pytest.mark.parametrize(
    ("example", "steps", "below"),
    [
        ("own_loop.py", 5, 0.5),  # log(10 digits) is 2.3
        ("nanogpt.py", 3, 3.2),  # log(100 letters) is 4.6
        ("huggingface.py", 3, 3.2),
    ],
)
def test_losses_fall(example: str, steps: int, below: float) -> None:
    if example == "huggingface.py":
        pytest.importorskip("transformers", reason="transformers is not installed")
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", run(example, ranks=2), flags=re.MULTILINE)]
    assert len(losses) == steps
    assert losses[-1] < below
    assert example != "own_loop.py" or load_file("model.safetensors")["0.weight"].shape == (200, 64)


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


def tiny_llama(folder: Path) -> None:
    """A language model with its tokenizer, as `save_pretrained` leaves them."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    tokens = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokens.pre_tokenizer, tokens.decoder = tokenizers.pre_tokenizers.ByteLevel(), tokenizers.decoders.ByteLevel()
    letters = tokenizers.trainers.BpeTrainer(vocab_size=280, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens.train_from_iterator(["the language reference, which every Python has"], letters)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokens).save_pretrained(folder)
    sizes = {"vocab_size": 280, "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=3, tie_word_embeddings=True)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


IN_FLOAT64 = """
import runpy
import torch.nn.functional as F
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.models.llama.modeling_llama import LlamaRMSNorm

LlamaRMSNorm.forward = lambda self, x: F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)
LOSS_MAPPING["ForCausalLM"] = lambda logits, labels, **_: F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
runpy.run_path({example!r}, run_name="__main__")
"""
"""transformers computes the norms of a Llama, and its loss, in float32 whatever the dtype; here they have that of the model."""


@pytest.mark.parametrize(("way", "tolerance"), [("whole", 1e-4), ("lora", 1e-4), ("float64", 1e-10)])
def test_a_language_model_is_fine_tuned_on_any_ranks(
    way: str, tolerance: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Three steps, on one rank and on three unequal ones: the loss falls, and the weights are the same and load back."""
    folder = tmp_path_factory.mktemp("models")
    tiny_llama(folder / "tiny")
    text = folder / "text.txt"  # what Python says of itself differs from release to release
    words, draw = ["the", "language", "reference", "which", "every", "Python", "has"], random.Random(0)
    text.write_text(" ".join(draw.choice(words) for _ in range(4000)))
    options = ["--model", str(folder / "tiny"), "--text", str(text), "--steps", "3", "--tokens", "16", "--lr", "1e-2"]
    if way == "lora":
        pytest.importorskip("peft", reason="peft is not installed")
        options += ["--lora", "4"]
    script = "finetune.py"
    if way == "float64":
        options += ["--dtype", "float64"]
        script = str(folder / "in_float64.py")
        Path(script).write_text(IN_FLOAT64.format(example=str(EXAMPLES / "finetune.py")))
    saved = []
    for ranks, speeds in ((1, "1"), (3, "1,0.5,0.25")):
        said = run(script, *options, "--speeds", speeds, "--save", str(folder / f"{ranks}"), ranks=ranks)
        losses = [float(each) for each in re.findall(r"^(?:before|after): loss ([\d.]+)", said, flags=re.MULTILINE)]
        assert len(losses) == 2
        assert losses[1] < losses[0]
        saved.append(load_file(folder / f"{ranks}" / "model.safetensors"))
    first, other = saved
    before = load_file(folder / "tiny" / "model.safetensors")
    assert first.keys() == other.keys() == before.keys()
    assert max(float((value - before[name]).abs().max()) for name, value in first.items()) > 1e-3
    for name, value in first.items():
        assert torch.allclose(value, other[name], rtol=0, atol=tolerance * float(value.abs().max())), name


@pytest.mark.parametrize(
    ("example", "told", "low", "high"),
    [
        ("unet.py", r"^step 60: loss ([\d.]+)", 0.0, 0.5),  # a guess of nothing has 1.0
        ("actor_critic.py", r"^update 120: reward (-[\d.]+)", -0.25, 0.0),  # standing still, or walking at random, has -0.5
        ("gan.py", r"^mean distance of the points from the center: ([\d.]+)", 0.7, 1.3),  # at 1.0 in the data, below 0.3 before
    ],
)
def test_loops_with_several_networks_and_optimizers_learn_the_same_on_any_ranks(
    example: str, told: str, low: float, high: float
) -> None:
    one, two = (float(re.findall(told, run(example, ranks=ranks), flags=re.MULTILINE)[0]) for ranks in (1, 2))
    assert low < one < high
    assert two == pytest.approx(one, abs=0.02)


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
