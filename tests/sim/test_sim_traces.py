"""Slowdowns from files and drawn ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tatami.errors import InputError
from tatami.sim.tiling import Change, draw_trace, read_trace


def test_a_trace_is_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("# of a Tuesday\nwhen,processor,slower\niteration:30, p0, 2\n2s,p1,4\n\niteration:60,p0,1\n")
    assert read_trace(file) == (
        Change(processor="p0", factor=0.5, at_iteration=30),
        Change(processor="p1", factor=0.25, at_s=2.0),
        Change(processor="p0", factor=1.0, at_iteration=60),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must begin with the line when,processor,slower"),
        ("iteration:30,p0,2\n", "must begin with the line when,processor,slower"),
        ("when,processor,slower\niteration:30,p0\n", "line 2 of the trace .* not 'iteration:30,p0'"),
        ("when,processor,slower\niteration:x,p0,2\n", "line 2"),
        ("when,processor,slower\niteration:3,p0,0\n", "line 2"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(InputError, match=words):
        read_trace(file)
    with pytest.raises(InputError, match="cannot read the trace"):
        read_trace(tmp_path / "none.csv")


def test_a_drawn_trace_follows_from_its_seed_and_every_slowdown_begins_and_ends() -> None:
    names = [f"p{rank}" for rank in range(50)]
    drawn = draw_trace(names, iterations=1000, seed=3)
    assert drawn == draw_trace(names, iterations=1000, seed=3)
    assert drawn != draw_trace(names, iterations=1000, seed=4)
    # Once in 1,000 iterations, of which some are slow already.
    assert 30 <= sum(change.factor < 1 for change in drawn) <= 60
    for name in names:
        own = [change for change in drawn if change.processor == name]
        assert [change.factor == 1.0 for change in own] == [bool(index % 2) for index in range(len(own))]
        assert [change.at_iteration for change in own] == sorted(change.at_iteration or 0 for change in own)
