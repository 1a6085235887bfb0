"""Commands that take one frozen dataclass: its fields are their options."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

import typer
from typer.testing import CliRunner

from tatami.cli.options import takes
from tatami.cli.train import train
from tatami.cli.train_job import TrainJob


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
