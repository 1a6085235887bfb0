"""What `tatami train` can be asked for, each thing once: the options of the command, and the settings that the records keep."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from tatami.cli.devices import DEVICE_HELP
from tatami.cli.numbers import MOST_RANKS, finite
from tatami.inputs import LARGEST_SEED
from tatami.tiling import DEFAULT_PLANNER

_DATA, _MODEL, _RANKS, _TRAINING, _OUTPUTS = "The task", "A model", "The ranks", "Training", "What it leaves behind"


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """A training job as it was asked for; the options say what each field is. None: the default, which may depend on others.

    Attributes:
        shifts: train on every digit moved by a pixel each way too; the demo does, for five times the work. No option.
    """

    data: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="digits or nettalk. Default: digits, with gpt a text.", rich_help_panel=_DATA),
    ] = None
    nettalk: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The NETtalk corpus, for --data nettalk.", rich_help_panel=_DATA)
    ] = None
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Draw so many. Default: all digits, 1024 letters of nettalk, 2048 sequences of a text.",
            rich_help_panel=_DATA,
        ),
    ] = None
    test_fraction: Annotated[
        float | None,
        typer.Option(
            callback=finite,
            min=0.0,
            max=0.9,
            metavar="SHARE",
            help="Held out, for the accuracy; 0 tells that of the training samples. Default: 0.2, of nettalk 0.",
            rich_help_panel=_DATA,
        ),
    ] = None
    shifts: bool = False
    net: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES", help="Inputs-hidden-...-outputs. Default: 64-80-10, nettalk 203-80-26.", rich_help_panel=_DATA
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="In place of --net: gpt learns the characters of a text, cnn sees digits as images, mlp is --net's default.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="For gpt, any text. Default: Python's own language reference.", rich_help_panel=_MODEL
        ),
    ] = None
    layers: Annotated[
        int | None,
        typer.Option(min=1, max=1000, metavar="N", help="Of gpt or cnn. Default: 2.", rich_help_panel=_MODEL),
    ] = None
    width: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100_000,
            metavar="N",
            help="Numbers for a token of gpt, channels of cnn. Default: 48, cnn 16.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    heads: Annotated[
        int | None,
        typer.Option(min=1, max=100_000, metavar="N", help="Of gpt's attention. Default: 6.", rich_help_panel=_MODEL),
    ] = None
    tokens: Annotated[
        int | None,
        typer.Option(min=1, max=100_000, metavar="N", help="Characters of a sequence. Default: 32.", rich_help_panel=_MODEL),
    ] = None
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--ranks",
            min=1,
            max=MOST_RANKS,
            metavar="N",
            help="How many. Default: one for each speed, else 1.",
            rich_help_panel=_RANKS,
        ),
    ] = None
    speeds: Annotated[
        str | None,
        typer.Option(
            metavar="1,1,0.5",
            help="What you know of the machines' relative speeds, in the order of the ranks. Left out, they are measured.",
            rich_help_panel=_RANKS,
        ),
    ] = None
    cluster: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="In place of --speeds: a cluster.toml of tatami probe.", rich_help_panel=_RANKS),
    ] = None
    emulate: Annotated[
        bool,
        typer.Option(
            "--emulate",
            help="Also slow the ranks to the given speeds: one machine plays several unequal ones.",
            rich_help_panel=_RANKS,
        ),
    ] = False
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How the work is laid out: timed (the least predicted time), even, grid, grid-rev, srpm, srpm-merged, "
            "weighted; or drpm, which starts evenly and learns the speeds while training.",
            rich_help_panel=_RANKS,
        ),
    ] = DEFAULT_PLANNER
    wire: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="bfloat16 or float16: sums over ranks travel so, half the bytes. Default: as they are, exact.",
            rich_help_panel=_RANKS,
        ),
    ] = None
    retile: Annotated[
        bool,
        typer.Option("--retile", help="With any method: re-tile while training as ranks change.", rich_help_panel=_RANKS),
    ] = False
    retile_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Re-tile by DRPM, which checks the balance after so many iterations, and not by what pays.",
            rich_help_panel=_RANKS,
        ),
    ] = None
    hosts: Annotated[
        str | None, typer.Option(metavar="A:4,B:4", help="Machines to start on; this one if left out.", rich_help_panel=_RANKS)
    ] = None
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help=DEVICE_HELP, rich_help_panel=_RANKS)] = "cpu"
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="mpi, torchdist, threads or single. Default: as started, else mpi for several ranks.",
            rich_help_panel=_RANKS,
        ),
    ] = None
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="adam, adamw or sgd.", rich_help_panel=_TRAINING)] = "adam"
    lr: Annotated[
        float | None,
        typer.Option(
            callback=finite, min=0.0, metavar="RATE", help="Default: 0.01, gpt 0.003, sgd 0.5.", rich_help_panel=_TRAINING
        ),
    ] = None
    momentum: Annotated[
        float | None,
        typer.Option(callback=finite, min=0.0, metavar="SHARE", help="Of sgd. Default: 0.", rich_help_panel=_TRAINING),
    ] = None
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="cross-entropy, mse, or squared-error (the paper's sum). Default: cross-entropy for digits, mse for nettalk.",
            rich_help_panel=_TRAINING,
        ),
    ] = None
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Global. Default: all samples, as in the paper; gpt 16, cnn 64.", rich_help_panel=_TRAINING
        ),
    ] = None
    epochs: Annotated[int | None, typer.Option(min=1, metavar="N", help="End after.", rich_help_panel=_TRAINING)] = None
    iterations: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="End after. Default: 200, without the other ends.", rich_help_panel=_TRAINING),
    ] = None
    stop_below: Annotated[
        float | None,
        typer.Option(callback=finite, metavar="LOSS", help="End when an iteration's loss is below.", rich_help_panel=_TRAINING),
    ] = None
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, metavar="N", help="Of weights, draws and order.", rich_help_panel=_TRAINING)
    ] = 0
    load: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Start from these weights (.safetensors).", rich_help_panel=_TRAINING),
    ] = None
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The weights as .safetensors: the ordinary state dict of the plain network.",
            rich_help_panel=_OUTPUTS,
        ),
    ] = None
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON lines: losses and checks.", rich_help_panel=_OUTPUTS)
    ] = None
    tensorboard: Annotated[Path | None, typer.Option(metavar="DIR", help="Event files.", rich_help_panel=_OUTPUTS)] = None
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Time per iteration, with the re-mappings (.png, .pdf, .svg).", rich_help_panel=_OUTPUTS
        ),
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that exist.", rich_help_panel=_OUTPUTS)] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON record.", rich_help_panel=_OUTPUTS)] = False

    def record(self) -> dict[str, Any]:
        """What was asked for, as JSON keeps it; what was left out is not in it."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items() if value is not None}
