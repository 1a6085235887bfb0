"""Progress under a clock in hand: when a line is written, and what it says."""

import io
import sys

import pytest

from hand_clock import HandClock
from tatami.errors import MissingExtraError
from tatami.progress import LineProgress, Progress, format_rate, reported, shown
from tatami.report.bar import BarProgress, progress_for


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_at_most_every_ten_seconds_and_one_at_the_end() -> None:
    clock, lines = HandClock(), list[str]()
    progress: Progress = LineProgress(clock=clock, write=lines.append)
    progress.start("train", total=4000)
    for _ in range(4):
        clock.sleep(5.0)
        progress.advance(500, fields={"loss": "0.25"})
    clock.sleep(5.0)
    progress.advance(2000, fields={"epoch": "2/2"})
    progress.finish()
    assert lines == [
        "train: 1,000 of 4,000 samples (25%) · 100 samples/s · 30 s left · loss 0.25",
        "train: 2,000 of 4,000 samples (50%) · 100 samples/s · 20 s left · loss 0.25",
        "train: 4,000 of 4,000 samples (100%) · in 25 s · 160 samples/s · loss 0.25 · epoch 2/2",
    ]


def test_the_rate_of_a_line_is_that_since_the_line_before_and_a_second_start_forgets_the_first() -> None:
    clock, lines = HandClock(), list[str]()
    progress = LineProgress(clock=clock, write=lines.append, every_s=1.0)
    progress.start("probe", unit="rounds")
    for amount in (10, 40):
        clock.sleep(2.0)
        progress.advance(amount)
    progress.start("two", total=0)
    progress.finish()
    assert lines == ["probe: 10 rounds · 5 rounds/s", "probe: 50 rounds · 20 rounds/s", "two: 0 of 0 samples"]


@pytest.mark.parametrize(("rate", "text"), [(8192.4, "8,192 samples/s"), (0.25, "0.25 samples/s"), (0.0, "0 samples/s")])
def test_rates(rate: float, text: str) -> None:
    assert format_rate(rate, unit="samples") == text


def test_lines_where_the_stream_is_no_terminal() -> None:
    out, clock = io.StringIO(), HandClock()
    progress = progress_for(out, clock=clock)
    assert isinstance(progress, LineProgress)
    progress.start("train", total=10)
    clock.sleep(10.0)
    progress.advance(10)
    assert out.getvalue() == "train: 10 of 10 samples (100%) · 1 samples/s · 0 s left\n"


def test_a_bar_on_a_terminal_shows_rate_and_fields() -> None:
    out, clock = Terminal(), HandClock()
    progress = progress_for(out, clock=clock)
    assert isinstance(progress, BarProgress)
    progress.start("train [a]", total=400)
    clock.sleep(2.0)
    progress.advance(400, fields={"loss": "0.5"})
    progress.finish()
    progress.finish()  # a second time does nothing
    text = out.getvalue()
    assert "train [a]" in text
    assert "400/400" in text
    assert "200 samples/s" in text


def test_lines_on_a_terminal_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert isinstance(progress_for(Terminal(), clock=HandClock()), LineProgress)
    with pytest.raises(MissingExtraError, match=r"pip install 'tatami-torch\[cli\]'"):
        BarProgress(Terminal(), clock=HandClock())


@pytest.mark.parametrize(("item_s", "is_shown"), [(4.0, True), (4.0, False), (1.0, True)])
def test_only_work_that_takes_long_is_reported_and_only_where_it_is_shown(item_s: float, is_shown: bool) -> None:
    clock, lines = HandClock(), list[str]()
    with shown(is_shown):
        for _ in reported(range(5), "moving rows", unit="messages", clock=clock, write=lines.append):
            clock.sleep(item_s)
    told = [
        "moving rows: 3 of 5 messages (60%) · 0.25 messages/s · 8 s left",
        "moving rows: 5 of 5 messages (100%) · in 20 s · 0.25 messages/s",
    ]
    assert lines == (told if item_s > 2 and is_shown else [])
