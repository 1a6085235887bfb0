"""Real runs of tests, which change a few of many settings."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from tatami.report.server_run import RunReport
from tatami.server import RunContext, RunSettings, train

_OF_CONTEXT = frozenset(each.name for each in fields(RunContext))


def train_with(
    model_fn: Any, loss_fn: Any, *, dataset: Any, directory: Path | str | None = None, **values: Any
) -> tuple[nn.Module, RunReport]:
    """`train`, with fields of `RunSettings` and of `RunContext` side by side."""
    context = RunContext(**{name: values.pop(name) for name in values.keys() & _OF_CONTEXT})
    settings = RunSettings(**values)
    return train(model_fn, loss_fn, dataset=dataset, settings=settings, directory=directory, context=context)
