"""Output files: nothing is overwritten unasked, nothing is half written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tatami.errors import OutputExistsError
from tatami.outputs import refuse_to_overwrite, write_text


def test_a_file_and_its_folders_are_made(tmp_path: Path) -> None:
    write_text(tmp_path / "a" / "b.txt", "µ\n")
    assert (tmp_path / "a" / "b.txt").read_bytes() == b"\xc2\xb5\n"


def test_what_exists_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "b.txt"
    write_text(path, "one")
    refuse_to_overwrite(tmp_path / "c.txt", force=False)
    refuse_to_overwrite(path, force=True)
    with pytest.raises(OutputExistsError, match=r"b.txt exists already; choose another name, or overwrite it with force"):
        write_text(path, "two")
    assert path.read_text() == "one"
    write_text(path, "two", force=True)
    assert path.read_text() == "two"


def test_a_file_that_another_process_wrote_in_the_meantime_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "b.txt"
    link = os.link

    def slower(source: Path, target: Path) -> None:
        path.write_text("quicker")
        link(source, target)

    monkeypatch.setattr(os, "link", slower)
    with pytest.raises(OutputExistsError, match="exists already"):
        write_text(path, "late")
    assert path.read_text() == "quicker"
    assert [file.name for file in tmp_path.iterdir()] == ["b.txt"]


def test_a_write_that_fails_leaves_the_old_file_and_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "b.txt"
    write_text(path, "old")

    def full(_source: Path, _target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        write_text(path, "new", force=True)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["b.txt"]
