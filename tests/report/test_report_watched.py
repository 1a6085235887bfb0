"""The picture of a run that was watched."""

import math

import pytest

from tatami.retiling import Alarm, DecisionKind, Glance

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from tatami.report import blank, draw_watched


def test_who_became_slower_is_named_and_each_price_has_its_line() -> None:
    figure, ax = blank()
    ax.remove()
    above, below = figure.subplots(2, sharex=True)
    whole, shift = DecisionKind.WHOLE, DecisionKind.SAMPLES
    glances = (
        Glance(iteration=8, speeds=(2.0, math.nan), loss_s={}, price_s={}),
        Glance(iteration=20, speeds=(1.0, 4.0), loss_s={whole: 0.5, shift: 0.1}, price_s={whole: 2.0, shift: 0.0}),
        Glance(iteration=21, speeds=(1.0, 4.0), loss_s={whole: 1.0}, price_s={whole: 2.0}),
    )
    alarm = Alarm(processor="p0", iteration=20, began=18, before_s=0.5, after_s=1.0, error=0.02)
    draw_watched(above, below, names=["p0", "p1"], glances=glances, alarms=[alarm], decisions=[], iterations=30)
    named = [text.get_text() for text in above.get_legend().get_texts()]
    assert named == ["p0", "alarm: slower", "alarm: faster"]
    (fast,) = [line for line in above.get_lines() if line.get_label() == "p0"]
    assert list(fast.get_ydata()) == [1.0, 0.5, 0.5, 0.5]
    shares = [list(line.get_ydata()) for line in below.get_lines()]
    # What moves no weights is free, and has no line.
    assert [each[1:] for each in shares if len(each) == 3] == [[0.25, 0.5]]
    assert below.get_xlabel() == "iteration"


def test_a_run_in_which_nothing_was_seen_is_drawn_empty() -> None:
    figure, ax = blank()
    ax.remove()
    above, below = figure.subplots(2, sharex=True)
    draw_watched(above, below, names=["p0"], glances=[], alarms=[], decisions=[], iterations=5)
    assert above.get_legend() is None
