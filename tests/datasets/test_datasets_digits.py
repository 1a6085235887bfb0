"""Digits, draws and splits, and data sets by name."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tatami.datasets import NAMES, Dataset, load
from tatami.datasets.digits import accuracy, load_digits, with_shifts
from tatami.errors import DataError, InputError, MissingExtraError


def numbered(samples: int) -> Dataset:
    """A data set whose inputs and targets are the samples' numbers."""
    numbers = torch.arange(samples, dtype=torch.float32).unsqueeze(1)
    return Dataset(name="numbered", x=numbers, y=numbers.clone(), outputs=1, accuracy=lambda _outputs, _targets: {"all": 1.0})


def test_digits() -> None:
    digits, classes = load(), load("digits", targets="classes")
    assert digits.name == "digits"
    assert (digits.samples, digits.inputs, digits.outputs) == (1797, 64, 10)
    assert (digits.x.dtype, digits.y.dtype, classes.y.dtype) == (torch.float32, torch.float32, torch.int64)
    assert digits.x.shape == (1797, 64)
    assert (digits.x.min().item(), digits.x.max().item()) == (0.0, 1.0)
    assert digits.x[0, :8].tolist() == [0.0, 0.0, 5 / 16, 13 / 16, 9 / 16, 1 / 16, 0.0, 0.0]
    assert classes.y[:5].tolist() == [0, 1, 2, 3, 4]
    assert digits.y.shape == (1797, 10)
    assert torch.equal(digits.y.argmax(dim=1), classes.y)
    assert torch.equal(digits.y.sum(dim=1), torch.ones(1797))


def test_digits_are_those_of_scikit_learn() -> None:
    """Their file is read without importing it, which takes longer than all else."""
    theirs, ours = pytest.importorskip("sklearn.datasets").load_digits(), load("digits", targets="classes")
    assert torch.equal(ours.x * 16, torch.tensor(theirs.data, dtype=torch.float32))
    assert torch.equal(ours.y, torch.tensor(theirs.target, dtype=torch.int64))


def test_accuracy_of_one_hot_targets_and_of_ids() -> None:
    ids = torch.tensor([3, 1, 4, 1])
    one_hot = torch.nn.functional.one_hot(ids, 10).float()
    outputs = one_hot.clone()
    outputs[0, 7] = 2.0
    assert accuracy(outputs, one_hot) == accuracy(outputs, ids) == {"digit": 0.75}
    with pytest.raises(DataError, match=r"digits: outputs must be \(samples, 10\), not \(4, 9\)"):
        accuracy(outputs[:, :9], ids)


@given(st.integers(2, 60), st.floats(0.1, 0.9), st.integers(0, 5))
def test_a_split_has_every_sample_once(samples: int, test_fraction: float, seed: int) -> None:
    data = numbered(samples)
    if not 0 < round(samples * test_fraction) < samples:
        with pytest.raises(InputError, match="leaves a part empty"):
            data.split(test_fraction=test_fraction, seed=seed)
        return
    train, test = data.split(test_fraction=test_fraction, seed=seed)
    assert test.samples == round(samples * test_fraction)
    assert sorted([*train.x.flatten().tolist(), *test.x.flatten().tolist()]) == list(range(samples))
    assert torch.equal(train.x, train.y)
    again, _ = data.split(test_fraction=test_fraction, seed=seed)
    assert torch.equal(train.x, again.x)


@pytest.mark.parametrize("test_fraction", [0.0, 1.0, -0.5, float("nan"), 0.001])
def test_a_split_that_cannot_be(test_fraction: float) -> None:
    with pytest.raises(InputError, match=r"numbered: test_fraction .* of 10 samples leaves a part empty"):
        numbered(10).split(test_fraction=test_fraction, seed=0)


def test_draws() -> None:
    data = load("digits", samples=100, seed=1)
    assert data.samples == 100
    assert torch.equal(data.x, load("digits", samples=100, seed=1).x)
    assert not torch.equal(data.x, load("digits", samples=100, seed=2).x)
    for samples in (0, 1798):
        with pytest.raises(InputError, match=f"digits: cannot draw {samples} samples, there are 1797; ask for 1 to 1797"):
            load("digits", samples=samples)


def test_inputs_and_targets_must_match() -> None:
    with pytest.raises(DataError, match="numbered: 3 inputs but 2 targets"):
        Dataset(name="numbered", x=torch.zeros(3, 1), y=torch.zeros(2, 1), outputs=1, accuracy=accuracy)


def test_names() -> None:
    assert NAMES == ("digits", "nettalk")
    with pytest.raises(InputError, match="unknown data set 'mnist'; choose one of digits, nettalk"):
        load("mnist")
    with pytest.raises(InputError, match=r"nettalk needs its corpus file, which is not shipped: .*--nettalk FILE"):
        load("nettalk")
    with pytest.raises(InputError, match=r"digits comes with scikit-learn and reads no file, but x.data was given"):
        load("digits", path="x.data")
    with pytest.raises(InputError, match="nettalk has features as targets, not 'classes'"):
        load("nettalk", path="x.data", targets="classes")
    with pytest.raises(InputError, match="unknown targets 'ids' for digits; choose one of one_hot, classes"):
        load_digits(targets="ids")


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(
        MissingExtraError, match=r"scikit-learn .* is not installed. Install it with:  pip install 'tatami-torch\[data\]'"
    ):
        load("digits")


def test_with_shifts_moves_every_digit_by_a_pixel_each_way() -> None:
    digits = load_digits(targets="classes").draw(3, seed=0)
    shifted = with_shifts(digits)
    assert shifted.x.shape == (15, 64)
    assert shifted.y.tolist() == digits.y.tolist() * 5
    image, up, down, left, right = shifted.x.view(5, 3, 8, 8)[:, 1]
    assert torch.equal(image, digits.x.view(3, 8, 8)[1])
    assert torch.equal(up[:-1], image[1:])
    assert torch.equal(down[1:], image[:-1])
    assert torch.equal(left[:, :-1], image[:, 1:])
    assert torch.equal(right[:, 1:], image[:, :-1])
