"""Data sets by name, draws and splits; NETtalk's codes and the faults of its file, and the real corpus where there is one."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tatami.datasets import NAMES, Dataset, load
from tatami.datasets.digits import accuracy as digits_accuracy
from tatami.datasets.digits import load_digits, with_shifts
from tatami.datasets.nettalk import ALPHABET, INPUTS, OUTPUTS, Word, accuracy, decode, encode, read_words
from tatami.datasets.phonemes import CODES, FEATURES, FEATURES_OF, PHONEMES, STRESSES, nearest
from tatami.datasets.text import accuracy as text_accuracy
from tatami.datasets.text import load_text
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
    assert digits_accuracy(outputs, one_hot) == digits_accuracy(outputs, ids) == {"digit": 0.75}
    with pytest.raises(DataError, match=r"digits: outputs must be \(samples, 10\), not \(4, 9\)"):
        digits_accuracy(outputs[:, :9], ids)


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
        Dataset(name="numbered", x=torch.zeros(3, 1), y=torch.zeros(2, 1), outputs=1, accuracy=digits_accuracy)


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


def test_a_sequence_is_followed_by_its_next_character(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("cab" * 7)  # 21 characters: 10 sequences of 2, and the last one's next
    text = load_text(tmp_path / "text", tokens=2)
    assert (text.name, text.samples, text.outputs) == ("text", 10, 3)
    assert text.x[:3].tolist() == [[2, 0], [1, 2], [0, 1]]
    assert text.y[:3].tolist() == [[0, 1], [2, 0], [1, 2]]
    assert torch.equal(text.y.flatten()[:-1], text.x.flatten()[1:])


def test_without_a_file_it_is_the_language_reference() -> None:
    text = load_text(tokens=32)
    assert text.samples > 10_000
    assert 90 < text.outputs < 300


def test_a_text_of_fewer_than_ten_sequences_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("cab" * 7)
    with pytest.raises(InputError, match=r"has 21 characters, and 10 sequences of 3 tokens need 31; give a longer text"):
        load_text(tmp_path / "text", tokens=3)


def test_accuracy_counts_characters() -> None:
    outputs = torch.eye(3)[torch.tensor([[0, 1], [2, 2]])]
    assert text_accuracy(outputs, torch.tensor([[0, 1], [2, 0]])) == {"character": 0.75}


CORPUS = Path(os.environ.get("TATAMI_NETTALK", Path(__file__).parents[3] / "shared" / "data" / "nettalk.data"))
needs_corpus = pytest.mark.skipif(
    not CORPUS.exists(), reason=f"no NETtalk corpus at {CORPUS} (TATAMI_NETTALK names another place)"
)

CAB = "cab\tk@b\t>1<\t0\n"
THREE = CAB + "ha\th-\t0>\t2 \nw\t+\t2\t1\n"


@pytest.fixture
def three(tmp_path: Path) -> Path:
    path = tmp_path / "three.data"
    path.write_text(THREE)
    return path


def at(position: int, letter: str) -> int:
    return position * 29 + (26 if letter == "_" else ord(letter) - ord("a"))


def test_words(three: Path) -> None:
    assert read_words(three) == (
        Word(letters="cab", phonemes="k@b", stresses=">1<", flag=0),
        Word(letters="ha", phonemes="h-", stresses="0>", flag=2),
        Word(letters="w", phonemes="+", stresses="2", flag=1),
    )


def test_codes_by_hand(three: Path) -> None:
    data = load("nettalk", path=three)
    assert (data.samples, data.inputs, data.outputs) == (6, 203, 26)
    assert (INPUTS, OUTPUTS, ALPHABET[26:]) == (203, 26, "_,.")
    assert data.x.dtype == data.y.dtype == torch.float32
    windows = ["___cab_", "__cab__", "_cab___", "___ha__", "__ha___", "___w___"]
    for row, window in zip(data.x, windows, strict=True):
        assert row.nonzero().flatten().tolist() == [at(position, letter) for position, letter in enumerate(window)]
        assert row.sum() == 7
    # Labial 0, Dental 1, Alveolar 2, Palatal 3, Velar 4, Glottal 5, Stop 6, Glide 10, Voiced 12, Tensed 13, Low 16, Silent 17,
    # Elide 18; marks < 21, > 22, 0 23, 1 24, 2 25
    on = [row.nonzero().flatten().tolist() for row in data.y]
    assert on == [[4, 6, 22], [1, 16, 24], [0, 6, 12, 21], [5, 10, 23], [17, 18, 22], [0, 3, 10, 12, 13, 16, 25]]
    assert data.y.max() == 1


def test_a_long_word_and_its_neighbour_do_not_mix() -> None:
    data = encode(
        (Word(letters="abcdefgh", phonemes="--------", stresses="0" * 8), Word(letters="z", phonemes="z", stresses="1"))
    )
    seen = ["".join(ALPHABET[i % 29] for i in row.nonzero().flatten().tolist()) for row in data.x]
    assert seen[3] == "abcdefg"
    assert seen[7] == "efgh___"
    assert seen[8] == "___z___"


def test_the_table_has_55_different_phonemes_of_21_features() -> None:
    assert len(FEATURES) == 21
    assert CODES.shape == (55, 21)
    assert len({tuple(code) for code in CODES.tolist()}) == 55
    assert {feature for features in FEATURES_OF.values() for feature in features.split()} == set(FEATURES)
    assert [len(features.split()) for features in FEATURES_OF.values()] == CODES.sum(axis=1).astype(int).tolist()


@given(st.text(st.sampled_from(PHONEMES), min_size=1, max_size=60), st.data(), st.floats(0.01, 100))
def test_decoding_undoes_coding_at_any_length(phonemes: str, data: st.DataObject, scale: float) -> None:
    size = len(phonemes)
    stresses = data.draw(st.text(st.sampled_from(STRESSES), min_size=size, max_size=size))
    dataset = encode((Word(letters="a" * size, phonemes=phonemes, stresses=stresses),))
    assert decode(dataset.y * scale) == (phonemes, stresses)


def test_of_two_equally_near_the_earlier_in_the_table() -> None:
    codes = torch.nn.functional.normalize(torch.from_numpy(CODES).double())
    halfway = codes[[PHONEMES.index("p"), PHONEMES.index("b")]].sum(dim=0, keepdim=True)
    assert PHONEMES[int(nearest(halfway)[0])] == "b"
    labial = torch.zeros(1, 26)
    labial[0, 0] = 1.0  # as near to I (High Labial) as to f (Labial Fricative) and p (Labial Stop)
    assert decode(labial)[0] == "I"
    assert decode(torch.zeros(1, 26)) == (PHONEMES[0], STRESSES[0])


def test_nearest_is_by_angle_not_by_distance() -> None:
    # A weak "-" (Silent, Elide) lies closer to nothing at all than to its own code; its direction is still "-".
    weak = torch.zeros(1, 26)
    weak[0, 17] = weak[0, 18] = 0.01
    weak[0, 24] = 0.02
    assert decode(weak) == ("-", "1")


def test_accuracy_counts_phonemes_and_stresses_apart() -> None:
    data = encode((Word(letters="cabs", phonemes="k@bs", stresses=">1<<"),))
    outputs = data.y.clone()
    outputs[0, :21] = torch.from_numpy(CODES[PHONEMES.index("g")])
    outputs[1, 21:] = outputs[2, 21:] = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])
    assert accuracy(outputs, data.y) == {"phoneme": 0.75, "stress": 0.5}
    assert data.accuracy(data.y, data.y) == {"phoneme": 1.0, "stress": 1.0}
    with pytest.raises(DataError, match=re.escape("outputs must be (samples, 26), not (4, 25)")):
        accuracy(outputs[:, :25], data.y)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("abbey\t@b-i-\t1<0", "line 2: 'abbey' has 3 fields, expected 4: word, phonemes, stress, flag"),
        ("abbey\t@b-i\t1<0<<\t0", "line 2: 'abbey' has 5 letters, 4 phonemes ('@b-i') and 5 stress marks ('1<0<<')"),
        ("abbey\t@b-i-\t1<0\t0", "line 2: 'abbey' has 5 letters, 5 phonemes ('@b-i-') and 3 stress marks ('1<0')"),
        ("abbey\t@b?i-\t1<0<<\t0", "line 2: 'abbey' has an unknown phoneme '?' at letter 3; known are aAcE"),
        ("abbey\t@b-i-\t1<7<<\t0", "line 2: 'abbey' has an unknown stress mark '7' at letter 3; known are <>012"),
        ("abBey\t@b-i-\t1<0<<\t0", "line 2: 'abBey' has an unknown letter 'B' at letter 3; known are abc"),
        ("ab_ey\t@b-i-\t1<0<<\t0", "line 2: 'ab_ey' has an unknown letter '_' at letter 3"),
        ("abbéy\t@b-i-\t1<0<<\t0", "line 2: 'abbéy' has an unknown letter 'é' at letter 4"),
        ("abbey\t@b-i-\t1<0<<\t3", "line 2: 'abbey' has the flag '3', expected 0 (regular), 1 (irregular) or 2 (foreign)"),
        ("\t\t\t0", "line 2: the word is empty"),
        ("", "line 2: '' has 1 fields, expected 4"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.data"
    path.write_text(CAB + line + "\n" + CAB, encoding="latin-1")
    with pytest.raises(DataError) as caught:
        read_words(path)
    assert str(caught.value).startswith(f"{path}, {message}")


def test_a_file_that_is_empty_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read the NETtalk file .*none.data: No such file"):
        read_words(tmp_path / "none.data")
    (tmp_path / "empty.data").write_text("\n")
    with pytest.raises(DataError, match=r"empty.data is empty; a NETtalk file has a word in each line"):
        read_words(tmp_path / "empty.data")


def test_a_seeded_draw_is_the_same_from_the_coded_and_the_uncoded(three: Path) -> None:
    one = load("nettalk", path=three, samples=4, seed=3)
    other = load("nettalk", path=three).draw(4, seed=3)
    assert torch.equal(one.x, other.x)
    assert torch.equal(one.y, other.y)
    assert len({tuple(row) for row in one.x.tolist()}) == 4
    draws = [tuple(load("nettalk", path=three, samples=4, seed=seed).x.flatten().tolist()) for seed in range(5)]
    assert len(set(draws)) > 1
    with pytest.raises(InputError, match="nettalk: cannot draw 7 samples, there are 6"):
        load("nettalk", path=three, samples=7)


@needs_corpus
def test_the_real_corpus() -> None:
    words = read_words(CORPUS)
    assert len(words) == 20_007
    data = encode(words)
    assert data.x.shape == (146_934, 203)
    assert data.y.shape == (146_934, 26)
    assert data.x.sum() == 146_934 * 7
    phonemes, stresses = decode(data.y)
    assert phonemes == "".join(word.phonemes for word in words)
    assert stresses == "".join(word.stresses for word in words)
    assert load("nettalk", path=CORPUS, samples=1024, seed=0).samples == 1024
