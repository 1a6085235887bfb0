"""Optimizers that look at a whole weight, of which a rank holds only a part, are refused; so are those of the plain network."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tatami.errors import InputError, ModelError
from tatami.tiled.registry import models

_NOT_ELEMENTWISE = ("LBFGS", "Adafactor", "Muon", "Shampoo", "SOAP", "LAMB", "Lamb", "LARS")

_lock = threading.Lock()
_is_watching = False


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that looks at a whole weight at once, of which a rank holds only a part.

    Raises:
        ModelError: the optimizer does not work element by element.
    """
    name = type(optimizer).__name__
    if name in _NOT_ELEMENTWISE:
        raise ModelError(
            f"{name} does not work element by element: it would see this rank's tile as the whole weight. "
            "Use SGD, Adam, AdamW, RMSprop, Adagrad or another optimizer that does"
        )


def watch_optimizers() -> None:
    """From now on, check optimizers of tiled parameters in their steps: a loop written by hand shows them to nothing else."""
    global _is_watching
    with _lock:
        if not _is_watching:
            register_optimizer_step_pre_hook(_check_step)
            _is_watching = True


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001 -- a hook of torch's
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if all(parameter.grad is None for parameter in stepped):
        plain = {id(parameter) for model in models() for parameter in model.plain_parameters()}
        if any(id(parameter) in plain for parameter in stepped):
            raise InputError(
                "this optimizer's step changes nothing: its parameters are those of the network that tatami.tile was given, "
                "and have no gradients. The tiled model's are new ones: make the optimizer from model.parameters() after "
                "model = tatami.tile(...)"
            )
    if type(optimizer).__name__ in _NOT_ELEMENTWISE:
        tiled = {id(parameter) for model in models() for parameter in model.tiled_parameters()}
        if any(id(parameter) in tiled for parameter in stepped):
            check_optimizer(optimizer)
