"""What a newcomer types first: `tatami examples`, and Tab."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tatami.cli.app import app

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_examples_are_copied_and_replace_nothing_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    listed = run(app, ["examples", "--list"])
    assert listed.exit_code == 0
    assert not list(tmp_path.iterdir())
    copied = run(app, ["examples"])
    assert copied.exit_code == 0, copied.output
    names = {file.name for file in EXAMPLES.iterdir() if file.suffix in (".py", ".toml", ".ipynb")}
    assert {file.name for file in (tmp_path / "tatami-examples").iterdir()} == names
    assert all(name in listed.stdout for name in names)
    assert "ten_lines.py             One network over ranks that are not alike." in copied.stdout
    changed = tmp_path / "tatami-examples" / "nanogpt.py"
    changed.write_text("mine", encoding="utf-8")
    refused = run(app, ["examples"])
    assert refused.exit_code == 2
    assert "exists already" in refused.stderr
    assert changed.read_text(encoding="utf-8") == "mine"
    assert run(app, ["examples", "--force"]).exit_code == 0
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
    result = CliRunner().invoke(app, [], env=environ, prog_name="tatami")
    assert result.exit_code == 0, result.output
    assert set(result.stdout.split()) == offered


def test_the_completion_of_a_shell_is_shown() -> None:
    """Typer's own: it asks which shell this is, so the test says it."""
    result = CliRunner().invoke(app, [], env={"_TATAMI_COMPLETE": "source_bash"}, prog_name="tatami")
    assert result.exit_code == 0, result.output
    assert "complete -o default -F _tatami_completion tatami" in result.stdout
