"""The options of `tatami train`, which are also the settings that the records keep."""

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
    partial(typer.Option, rich_help_panel=panel) for panel in ("Task", "Model", "Ranks", "Training", "Outputs")
)


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """The options of a training job; their help texts describe the fields. None: the default, which may depend on others.

    Attributes:
        shifts: also train on every digit shifted by a pixel each way, as the demo does: five times the work. Not an option.
    """

    data: Annotated[str | None, _data(metavar="NAME", help="Data set: digits or nettalk; gpt uses a text.")] = None
    nettalk: Annotated[Path | None, _data(metavar="FILE", help="The NETtalk corpus, for --data nettalk.")] = None
    samples: Annotated[
        int | None,
        _data(min=1, metavar="N", help="Number of samples. Default: all digits, 1024 letters, 2048 sequences of a text."),
    ] = None
    shifts: bool = False
    net: Annotated[
        str | None, _data(metavar="SIZES", help="Layer sizes: inputs-hidden-...-outputs. Default: 64-80-10, nettalk 203-80-26.")
    ] = None
    model: Annotated[
        str | None,
        _model(
            metavar="NAME",
            help="Model instead of --net: gpt learns the characters of a text, cnn digits as images, mlp is --net's default.",
        ),
    ] = None
    text: Annotated[Path | None, _model(metavar="FILE", help="Text for gpt. Default: Python's own language reference.")] = None
    layers: Annotated[int | None, _model(min=1, max=1000, metavar="N", help="Layers of gpt or cnn. Default: 2.")] = None
    width: Annotated[
        int | None, _model(min=1, max=100_000, metavar="N", help="Width of gpt, channels of cnn. Default: 48, cnn 16.")
    ] = None
    heads: Annotated[int | None, _model(min=1, max=100_000, metavar="N", help="Attention heads of gpt. Default: 6.")] = None
    tokens: Annotated[int | None, _model(min=1, max=100_000, metavar="N", help="Characters of a sequence. Default: 32.")] = None
    ranks: Annotated[
        int | None,
        _ranks("-n", "--ranks", min=1, max=MOST_RANKS, metavar="N", help="Number of ranks. Default: one for each speed, or 1."),
    ] = None
    speeds: Annotated[
        str | None,
        _ranks(
            metavar="1,1,0.5",
            help="Relative speeds of the machines, in the order of the ranks. Default: measured.",
        ),
    ] = None
    cluster: Annotated[Path | None, _ranks(metavar="FILE", help="Cluster file, instead of --speeds.")] = None
    emulate: Annotated[
        bool, _ranks("--emulate", help="Also slow the ranks to the given speeds, to emulate unequal machines on one.")
    ] = False
    method: Annotated[
        str,
        _ranks(
            metavar="NAME",
            help="Planner: timed (the least predicted time), even, grid, grid-rev, srpm, srpm-merged, "
            "weighted; or drpm, which starts with equal tiles and learns the speeds during training.",
        ),
    ] = DEFAULT_PLANNER
    wire: Annotated[
        str | None,
        _ranks(metavar="NAME", help="Round messages between ranks to bfloat16 or float16, half the bytes. Default: exact."),
    ] = None
    stages: Annotated[
        int | None,
        _ranks(min=1, metavar="N", help="Number of pipeline stages; 1: none. Default: the number predicted to be fastest."),
    ] = None
    micro_batches: Annotated[
        int | None, _ranks(min=1, metavar="N", help="Number of micro-batches in every replica. Default: as planned.")
    ] = None
    retile: Annotated[bool, _ranks("--retile", help="Re-tile during training when the speeds of ranks change.")] = False
    retile_every: Annotated[
        int | None,
        _ranks(min=1, metavar="N", help="Re-tile by DRPM, with a check every N iterations, instead of when it pays."),
    ] = None
    hosts: Annotated[str | None, _ranks(metavar="A:4,B:4", help="Machines to start ranks on. Default: this one.")] = None
    device: Annotated[str, _ranks(metavar="auto|cpu|cuda", help=DEVICE_HELP)] = "cpu"
    backend: Annotated[
        str | None,
        _ranks(metavar="NAME", help="Backend: mpi, tcp, threads or single. Default: the launcher's, otherwise mpi."),
    ] = None
    optimizer: Annotated[str, _training(metavar="NAME", help="Optimizer: adam, adamw or sgd.")] = "adam"
    lr: Annotated[
        float | None,
        _training(callback=finite, min=0.0, metavar="RATE", help="Learning rate. Default: 0.01, gpt 0.003, sgd 0.5."),
    ] = None
    momentum: Annotated[
        float | None, _training(callback=finite, min=0.0, metavar="SHARE", help="SGD momentum. Default: 0.")
    ] = None
    loss: Annotated[
        str | None,
        _training(
            metavar="NAME",
            help="Loss: cross-entropy, mse, or squared-error (the paper's sum). Default: cross-entropy, nettalk mse.",
        ),
    ] = None
    batch_size: Annotated[
        int | None, _training(min=1, metavar="N", help="Global batch size. Default: all samples; gpt 16, cnn 64.")
    ] = None
    epochs: Annotated[int | None, _training(min=1, metavar="N", help="Stop after N epochs.")] = None
    iterations: Annotated[
        int | None, _training(min=1, metavar="N", help="Stop after N iterations. Default: 200 if there is no other limit.")
    ] = None
    stop_below: Annotated[
        float | None, _training(callback=finite, metavar="LOSS", help="Stop when the loss of an iteration is below LOSS.")
    ] = None
    seed: Annotated[int, _training(min=0, max=LARGEST_SEED, metavar="N", help="Seed for weights, sampling and shuffling.")] = 0
    load: Annotated[Path | None, _training(metavar="FILE", help="Start from these weights (.safetensors).")] = None
    save: Annotated[Path | None, _outputs(metavar="FILE", help="File for the plain network's state dict (.safetensors).")] = (
        None
    )
    log: Annotated[Path | None, _outputs(metavar="FILE", help="Log of losses and checks, as JSON lines.")] = None
    tensorboard: Annotated[Path | None, _outputs(metavar="DIR", help="Folder for TensorBoard's event files.")] = None
    plot: Annotated[
        Path | None, _outputs(metavar="FILE", help="Draw the time per iteration, with the re-mappings (.png, .pdf, .svg).")
    ] = None
    force: Annotated[bool, _outputs("--force", help="Overwrite files that exist.")] = False
    as_json: Annotated[bool, _outputs("--json", help="Print one JSON record.")] = False

    def record(self) -> dict[str, Any]:
        """Return the given options, for JSON; options that were not given are left out."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items() if value is not None}
