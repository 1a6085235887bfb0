"""How commands end: one message without a traceback, and an exit code; also where they are one of several ranks."""

import errno
import io
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from tatami.cli import group
from tatami.cli.app import app as everything
from tatami.cli.group import Commands
from tatami.cli.options import finite, given_sizes, takes
from tatami.cli.terminal import RANK_TERMINAL_VARIABLE, environment_of_ranks, shown_warnings, width
from tatami.cli.train import train
from tatami.cli.train_job import TrainJob
from tatami.errors import CommTimeoutError, InputError, MissingExtraError, TrainingError

ERRORS: dict[str, tuple[BaseException, int, str]] = {
    "input": (InputError("there is no such net"), 2, "error: there is no such net"),
    "extra": (MissingExtraError("Ray", extra="server"), 2, "pip install 'tatami-torch[server]'"),
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


@pytest.mark.parametrize("columns", [60, 72])
def test_help_is_complete_in_a_narrow_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def paths(command: Any) -> Iterator[tuple[str, ...]]:
        yield (command.name,)
        yield from ((command.name, *rest) for each in getattr(command, "commands", {}).values() for rest in paths(each))

    found = [path[1:] for path in paths(typer.main.get_command(everything))]
    assert len(found) > 20
    monkeypatch.setenv("COLUMNS", str(columns))
    texts = {path: CliRunner().invoke(everything, [*path, "--help"]).stdout for path in found}
    for text in texts.values():
        assert max(map(len, text.splitlines())) <= columns
        assert not re.search(r"…|│|\[/|\[bold|\w\.\.\.\n", text)
    assert "  --micro-batches <int range>\n" in texts["plan",]
    assert "Measure every rank's speed on real work, and the links between the hosts." in " ".join(texts[()].split())
    monkeypatch.setenv("COLUMNS", "80")
    assert "│ --planner " in CliRunner().invoke(everything, ["plan", "--help"]).stdout


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


@dataclass(frozen=True, kw_only=True)
class BakingSettings:
    """Of a test."""

    loaves: Annotated[int, typer.Option("-n", "--loaves", min=1, help="How many.")] = 2
    flour: Annotated[str | None, typer.Option(help="Of which.")] = None
    hidden: int = 7


def test_the_fields_are_the_options() -> None:
    baked: list[BakingSettings] = []
    app = typer.Typer()

    @app.command()
    @takes(BakingSettings)
    def bake(settings: BakingSettings) -> None:
        """Bake bread."""
        baked.append(settings)

    assert CliRunner().invoke(app, []).exit_code == 0
    assert CliRunner().invoke(app, ["-n", "3", "--flour", "rye"]).exit_code == 0
    assert baked == [BakingSettings(), BakingSettings(loaves=3, flour="rye")]
    assert CliRunner().invoke(app, ["-n", "0"]).exit_code == 2
    assert CliRunner().invoke(app, ["--hidden", "1"]).exit_code == 2
    told = CliRunner().invoke(app, ["--help"]).output
    assert "Bake bread." in told
    assert "How many." in told
    assert len(baked) == 2


def test_the_options_of_train_are_the_settings_that_the_library_takes_and_the_records_keep() -> None:
    assert set(train.__annotations__) == {each.name for each in fields(TrainJob)} - {"shifts"}
    assert TrainJob(ranks=3, stop_below=0.5).record().items() >= {"ranks": 3, "stop_below": 0.5, "method": "timed"}.items()


EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_examples_are_copied_and_replace_nothing_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    listed = run(everything, ["examples", "--list"])
    assert listed.exit_code == 0
    assert not list(tmp_path.iterdir())
    copied = run(everything, ["examples"])
    assert copied.exit_code == 0, copied.output
    names = {file.name for file in EXAMPLES.iterdir() if file.suffix in (".py", ".toml", ".ipynb")}
    assert {file.name for file in (tmp_path / "tatami-examples").iterdir()} == names
    assert all(name in listed.stdout for name in names)
    assert "ten_lines.py             Trains one network on ranks of unequal speed." in copied.stdout
    changed = tmp_path / "tatami-examples" / "nanogpt.py"
    changed.write_text("mine", encoding="utf-8")
    refused = run(everything, ["examples"])
    assert refused.exit_code == 2
    assert "exists already" in refused.stderr
    assert changed.read_text(encoding="utf-8") == "mine"
    assert run(everything, ["examples", "--force"]).exit_code == 0
    assert changed.read_bytes() == (EXAMPLES / "nanogpt.py").read_bytes()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tatami do", {"doctor"}),
        ("tatami re", {"report"}),
        ("tatami server re", {"report", "resume"}),
        ("tatami run --h", {"--hosts", "--help", "--heartbeat"}),
    ],
)
def test_tab_completes_commands_and_options(typed: str, offered: set[str]) -> None:
    environ = {"_TATAMI_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    result = CliRunner().invoke(everything, [], env=environ, prog_name="tatami")
    assert result.exit_code == 0, result.output
    assert set(result.stdout.split()) == offered


def test_the_completion_of_a_shell_is_shown() -> None:
    """Typer's own: it asks which shell this is, so the test says it."""
    result = CliRunner().invoke(everything, [], env={"_TATAMI_COMPLETE": "source_bash"}, prog_name="tatami")
    assert result.exit_code == 0, result.output
    assert "complete -o default -F _tatami_completion tatami" in result.stdout
