"""A text as a task: sequences of characters, and those that follow."""

from pathlib import Path

import pytest
import torch

from tatami.datasets.text import accuracy, load_text
from tatami.errors import InputError


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
    assert accuracy(outputs, torch.tensor([[0, 1], [2, 0]])) == {"character": 0.75}
