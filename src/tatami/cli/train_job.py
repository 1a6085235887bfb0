"""What `tatami train` can be asked for, each thing once: the options of the command, and the settings that the records keep."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tatami.cli.options import DEVICE_HELP, MOST_RANKS, finite
from tatami.inputs import LARGEST_SEED
from tatami.tiling import DEFAULT_PLANNER

_data, _model, _ranks, _training, _outputs = (
    partial(typer.Option, rich_help_panel=panel)
    for panel in ("The task", "A model", "The ranks", "Training", "What it leaves behind")
)


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """A training job as it was asked for; the options say what each field is. None: the default, which may depend on others.

    Attributes:
        shifts: train on every digit moved by a pixel each way too; the demo does, for five times the work. No option.
    """

    data: Annotated[str | None, _data(metavar="NAME", help="digits or nettalk. Default: digits, with gpt a text.")] = None
    nettalk: Annotated[Path | None, _data(metavar="FILE", help="The NETtalk corpus, for --data nettalk.")] = None
    samples: Annotated[
        int | None,
        _data(min=1, metavar="N", help="Draw so many. Default: all digits, 1024 letters of nettalk, 2048 sequences of a text."),
    ] = None
    test_fraction: Annotated[
        float | None,
        _data(
            callback=finite,
            min=0.0,
            max=0.9,
            metavar="SHARE",
            help="Held out, for the accuracy; 0 tells that of the training samples. Default: 0.2, of nettalk 0.",
        ),
    ] = None
    shifts: bool = False
    net: Annotated[
        str | None, _data(metavar="SIZES", help="Inputs-hidden-...-outputs. Default: 64-80-10, nettalk 203-80-26.")
    ] = None
    model: Annotated[
        str | None,
        _model(
            metavar="NAME",
            help="In place of --net: gpt learns the characters of a text, cnn sees digits as images, mlp is --net's default.",
        ),
    ] = None
    text: Annotated[
        Path | None, _model(metavar="FILE", help="For gpt, any text. Default: Python's own language reference.")
    ] = None
    layers: Annotated[int | None, _model(min=1, max=1000, metavar="N", help="Of gpt or cnn. Default: 2.")] = None
    width: Annotated[
        int | None,
        _model(min=1, max=100_000, metavar="N", help="Numbers for a token of gpt, channels of cnn. Default: 48, cnn 16."),
    ] = None
    heads: Annotated[int | None, _model(min=1, max=100_000, metavar="N", help="Of gpt's attention. Default: 6.")] = None
    tokens: Annotated[int | None, _model(min=1, max=100_000, metavar="N", help="Characters of a sequence. Default: 32.")] = None
    ranks: Annotated[
        int | None,
        _ranks("-n", "--ranks", min=1, max=MOST_RANKS, metavar="N", help="How many. Default: one for each speed, else 1."),
    ] = None
    speeds: Annotated[
        str | None,
        _ranks(
            metavar="1,1,0.5",
            help="What you know of the machines' relative speeds, in the order of the ranks. Left out, they are measured.",
        ),
    ] = None
    cluster: Annotated[Path | None, _ranks(metavar="FILE", help="In place of --speeds: a cluster.toml of tatami probe.")] = None
    emulate: Annotated[
        bool, _ranks("--emulate", help="Also slow the ranks to the given speeds: one machine plays several unequal ones.")
    ] = False
    method: Annotated[
        str,
        _ranks(
            metavar="NAME",
            help="How the work is laid out: timed (the least predicted time), even, grid, grid-rev, srpm, srpm-merged, "
            "weighted; or drpm, which starts evenly and learns the speeds while training.",
        ),
    ] = DEFAULT_PLANNER
    wire: Annotated[
        str | None,
        _ranks(
            metavar="NAME", help="bfloat16 or float16: sums over ranks travel so, half the bytes. Default: as they are, exact."
        ),
    ] = None
    stages: Annotated[
        int | None,
        _ranks(min=1, metavar="N", help="So many pipeline stages; 1: none. Default: as are predicted to be fastest."),
    ] = None
    micro_batches: Annotated[
        int | None, _ranks(min=1, metavar="N", help="In which every replica computes its samples. Default: as planned.")
    ] = None
    retile: Annotated[bool, _ranks("--retile", help="With any method: re-tile while training as ranks change.")] = False
    retile_every: Annotated[
        int | None,
        _ranks(
            min=1, metavar="N", help="Re-tile by DRPM, which checks the balance after so many iterations, and not by what pays."
        ),
    ] = None
    hosts: Annotated[str | None, _ranks(metavar="A:4,B:4", help="Machines to start on; this one if left out.")] = None
    device: Annotated[str, _ranks(metavar="auto|cpu|cuda", help=DEVICE_HELP)] = "cpu"
    backend: Annotated[
        str | None,
        _ranks(metavar="NAME", help="mpi, torchdist, threads or single. Default: as started, else mpi for several ranks."),
    ] = None
    optimizer: Annotated[str, _training(metavar="NAME", help="adam, adamw or sgd.")] = "adam"
    lr: Annotated[
        float | None, _training(callback=finite, min=0.0, metavar="RATE", help="Default: 0.01, gpt 0.003, sgd 0.5.")
    ] = None
    momentum: Annotated[float | None, _training(callback=finite, min=0.0, metavar="SHARE", help="Of sgd. Default: 0.")] = None
    loss: Annotated[
        str | None,
        _training(
            metavar="NAME",
            help="cross-entropy, mse, or squared-error (the paper's sum). Default: cross-entropy for digits, mse for nettalk.",
        ),
    ] = None
    batch_size: Annotated[
        int | None, _training(min=1, metavar="N", help="Global. Default: all samples, as in the paper; gpt 16, cnn 64.")
    ] = None
    epochs: Annotated[int | None, _training(min=1, metavar="N", help="End after.")] = None
    iterations: Annotated[
        int | None, _training(min=1, metavar="N", help="End after. Default: 200, without the other ends.")
    ] = None
    stop_below: Annotated[
        float | None, _training(callback=finite, metavar="LOSS", help="End when an iteration's loss is below.")
    ] = None
    seed: Annotated[int, _training(min=0, max=LARGEST_SEED, metavar="N", help="Of weights, draws and order.")] = 0
    load: Annotated[Path | None, _training(metavar="FILE", help="Start from these weights (.safetensors).")] = None
    save: Annotated[
        Path | None, _outputs(metavar="FILE", help="The weights as .safetensors: the ordinary state dict of the plain network.")
    ] = None
    log: Annotated[Path | None, _outputs(metavar="FILE", help="JSON lines: losses and checks.")] = None
    tensorboard: Annotated[Path | None, _outputs(metavar="DIR", help="Event files.")] = None
    plot: Annotated[
        Path | None, _outputs(metavar="FILE", help="Time per iteration, with the re-mappings (.png, .pdf, .svg).")
    ] = None
    force: Annotated[bool, _outputs("--force", help="Overwrite files that exist.")] = False
    as_json: Annotated[bool, _outputs("--json", help="Print one JSON record.")] = False

    def record(self) -> dict[str, Any]:
        """What was asked for, as JSON keeps it; what was left out is not in it."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items() if value is not None}
