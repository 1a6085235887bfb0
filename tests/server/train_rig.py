"""Real runs of tests, which change a few of many settings."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tatami.report.server_run import RunReport
from tatami.server import RunContext, RunSettings, train

_OF_CONTEXT = frozenset(each.name for each in fields(RunContext))


def model_fn() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def train_with(
    model_fn: Any, loss_fn: Any, *, dataset: Any, directory: Path | str | None = None, **values: Any
) -> tuple[nn.Module, RunReport]:
    """`train`, with fields of `RunSettings` and of `RunContext` side by side."""
    context = RunContext(**{name: values.pop(name) for name in values.keys() & _OF_CONTEXT})
    settings = RunSettings(**values)
    return train(model_fn, loss_fn, dataset=dataset, settings=settings, directory=directory, context=context)
