"""What is trained, and on what: the user's functions and data, looked at before anything is started."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tatami.datasets.dataset import Data
from tatami.errors import InputError
from tatami.server.learner import LossFn, ModelFn, check_model


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """The user's part of a run.

    Raises:
        InputError: not a function, or not data.
    """

    model_fn: ModelFn
    loss_fn: LossFn
    dataset: Data

    def __post_init__(self) -> None:
        for name in ("model_fn", "loss_fn"):
            if not callable(function := getattr(self, name)):
                raise InputError(f"{name} must be a function, not {function!r}")

    def model(self, *, seed: int) -> nn.Module:
        """What `model_fn` builds.

        Raises:
            ModelError: it cannot be trained by parameter servers.
            InputError: it is not a module, or `model_fn` ends the process.
        """
        torch.manual_seed(seed)
        try:
            model = self.model_fn()
        except SystemExit as error:
            raise InputError(f"model_fn ends the process (exit code {error.code}); it must return a model") from error
        if not isinstance(model, nn.Module):
            raise InputError(f"model_fn must return a torch.nn.Module, not {model!r}")
        check_model(model)
        return model

    def samples(self) -> int:
        """How many there are.

        Raises:
            InputError: none, or inputs and targets that are not as many as each other, or no data set.
        """
        data = self.dataset
        if isinstance(data, tuple):
            if len(data) != 2 or not all(isinstance(each, torch.Tensor) and each.ndim for each in data):
                what = ", ".join(type(each).__name__ for each in data)
                raise InputError(f"dataset must be a pair of tensors (samples, ...), inputs and targets, not ({what})")
            if len(data[0]) != len(data[1]):
                raise InputError(f"{len(data[0])} inputs but {len(data[1])} targets; each input needs one")
            size = len(data[0])
        elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
            size = len(data)
        else:
            what = type(data).__name__
            raise InputError(f"dataset must be a pair of tensors, or have a length and dataset[i] == (x, y); {what} has not")
        if size == 0:
            raise InputError("the data set is empty")
        return size
