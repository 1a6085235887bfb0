"""How commands end: one message without a traceback, and an exit code; also where they are one of several ranks."""

from __future__ import annotations

import errno
import io
import warnings
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from tatami.cli import group
from tatami.cli.group import Commands
from tatami.cli.options import finite, given_sizes
from tatami.cli.terminal import RANK_TERMINAL_VARIABLE, environment_of_ranks, shown_warnings, width
from tatami.errors import CommTimeoutError, InputError, MissingExtraError, TrainingError

ERRORS: dict[str, tuple[BaseException, int, str]] = {
    "input": (InputError("there is no such net"), 2, "error: there is no such net"),
    "extra": (MissingExtraError("Ray", extra="server"), 2, "pip install 'tatami[server]'"),
    "training": (TrainingError("rank 3 is lost"), 1, "error: rank 3 is lost"),
    "disk": (OSError(errno.ENOSPC, "No space left on device"), 1, "No space left on device"),
    "memory": (MemoryError(), 1, "error: there is not enough memory for this"),
    "long": (InputError("x" * 5000), 2, "xxx...xxx"),
}
app = typer.Typer(cls=Commands, pretty_exceptions_enable=False)


@app.command()
def fail(how: str) -> None:
    """Raise one of `ERRORS`."""
    raise ERRORS[how][0]


@app.command()
def fine() -> None:
    """Do nothing."""
    warnings.warn("this is slow", stacklevel=1)


@pytest.mark.parametrize("how", ERRORS)
def test_what_is_raised_on_purpose_is_one_message_and_an_exit_code(how: str) -> None:
    _, code, said = ERRORS[how]
    result = CliRunner().invoke(app, ["fail", how])
    assert result.exit_code == code
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert len(result.stderr) < 1100
    assert result.stdout == ""


def test_a_fault_of_the_program_is_not_hidden() -> None:
    ERRORS["fault"] = (ZeroDivisionError(), 1, "")
    try:
        assert isinstance(CliRunner().invoke(app, ["fail", "fault"]).exception, ZeroDivisionError)
    finally:
        del ERRORS["fault"]


def test_a_warning_is_one_line() -> None:
    result = CliRunner().invoke(app, ["fine"])
    assert (result.exit_code, result.stderr) == (0, "warning: this is slow\n")


@pytest.mark.parametrize(
    ("rank", "error", "waits"),
    [("0", InputError("no"), False), ("1", InputError("no"), True), ("1", CommTimeoutError("no"), False)],
)
def test_what_all_ranks_raise_rank_0_says_first(
    rank: str, error: Exception, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waited for whom is known to the rank that waited, so that says it at once."""
    happened: list[object] = []

    def stop(message: str, *, exit_code: int) -> None:
        happened.append((message, exit_code))
        raise SystemExit(exit_code)

    monkeypatch.setenv("PMI_RANK", rank)
    monkeypatch.setattr(group, "time", SimpleNamespace(sleep=happened.append))
    monkeypatch.setattr("tatami.comm.session.stop_all_ranks", stop)
    monkeypatch.setitem(ERRORS, "ranks", (error, 0, ""))
    assert CliRunner().invoke(app, ["fail", "ranks"]).exit_code == happened[-1][1]  # type: ignore[index]
    assert happened == [*([group._GRACE_S] if waits else []), ("error: no", 2 if isinstance(error, InputError) else 1)]


class Terminal(io.StringIO):
    """What is written to it appears at once."""

    def isatty(self) -> bool:
        return True


def test_ranks_know_of_the_terminal_that_they_write_to_through_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment_of_ranks() == {}
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{stream}", Terminal())
    monkeypatch.setenv("COLUMNS", "93")
    told = environment_of_ranks()
    assert told[RANK_TERMINAL_VARIABLE] == told["COLUMNS"] == "93"
    monkeypatch.setenv(RANK_TERMINAL_VARIABLE, "77")
    assert width() == 77
    monkeypatch.setenv(RANK_TERMINAL_VARIABLE, "400")
    assert width() == 120


def test_warnings_are_as_before_when_a_command_has_ended() -> None:
    before = warnings.showwarning
    with shown_warnings():
        assert warnings.showwarning is not before
    assert warnings.showwarning is before


def test_numbers_that_no_type_refuses() -> None:
    assert given_sizes("--sizes", "1KiB, 2 MiB,7B") == (1024, 2 * 1024**2, 7)
    with pytest.raises(InputError, match=r"^--sizes: .*'many'"):
        given_sizes("--sizes", "1KiB,many")
    assert finite(None) is None
    assert finite(0.5) == 0.5
    for value in (float("nan"), float("inf")):
        with pytest.raises(typer.BadParameter, match="must be a finite number"):
            finite(value)
