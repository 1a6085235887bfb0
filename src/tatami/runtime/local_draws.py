"""Random numbers that every replica draws for itself, where they cannot be those of the plain model: `random="local"`.

The ranks of a replica see the same samples, so they must draw alike; replicas see different ones, and draw differently. Each
training pass has a state of its own, from the seed of the model, the number of the pass and that of the replica. Functions that
draw are run with it; everything else, and torch's global state, is left alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from tatami.random_state import torch_state

_GLOBAL_STATE = threading.Lock()
"""torch's functions draw from the state of the whole process, and ranks may be its threads."""

_DRAWING: frozenset[Any] = frozenset({
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu, F.gumbel_softmax,
    F.scaled_dot_product_attention, F.multi_head_attention_forward, F.fractional_max_pool2d, F.fractional_max_pool3d,
    torch.dropout, torch.dropout_, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout, torch.rrelu,
    torch.bernoulli, torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like,
    torch.randint_like, torch.normal, torch.multinomial, torch.poisson, torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu,
    torch.Tensor.bernoulli, torch.Tensor.bernoulli_, torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.exponential_,
    torch.Tensor.random_, torch.Tensor.multinomial, torch.Tensor.log_normal_, torch.Tensor.geometric_, torch.Tensor.cauchy_,
})  # fmt: skip


class LocalDraws:
    """What a rank draws in training.

    Args:
        generator: that of the model, in the same state on every rank; it is not advanced.
        functions: more functions that draw: those that did on the sample batch.
    """

    def __init__(self, generator: torch.Generator, *, functions: Collection[Any] = ()) -> None:
        own = torch.Generator()
        own.set_state(generator.get_state())
        self._seed = int(torch.randint(2**62, (1,), generator=own, dtype=torch.int64, device="cpu"))
        self._functions = _DRAWING | frozenset(functions)
        self.num_passes = 0
        """Training passes until now, the same on all ranks: with the seed, all that the next draws depend on."""

    def state_dict(self) -> dict[str, int]:
        """All that the next draws depend on beside the replica."""
        return {"seed": self._seed, "num_passes": self.num_passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._seed, self.num_passes = state["seed"], state["num_passes"]

    def next_pass(self, *, replica: int, part: int = 0) -> TorchFunctionMode:
        """A context for the next training pass of a rank in this replica; for a later micro-batch, for the same pass."""
        if part:
            return self._drawing(self.num_passes - 1, replica, 1 + part)
        context = self._drawing(self.num_passes, replica)
        self.num_passes += 1
        return context

    def evaluation(self, *, replica: int) -> TorchFunctionMode:
        """A context for a pass without training; until the next one with it, all draw the same."""
        return self._drawing(self.num_passes, replica, 1)

    def _drawing(self, *place: int) -> TorchFunctionMode:
        mixed = np.random.SeedSequence([self._seed, *place]).generate_state(1, np.uint64)
        return LocalDrawing(torch.Generator().manual_seed(int(mixed[0] >> np.uint64(1))).get_state(), self._functions)


class LocalDrawing(TorchFunctionMode):
    """A pass in which functions draw from a state of their own."""

    def __init__(self, state: torch.Tensor, functions: frozenset[Any]) -> None:
        super().__init__()
        self._state = state
        self._functions = functions

    def copy(self) -> LocalDrawing:
        """One that draws what this one draws from now on."""
        return LocalDrawing(self._state, self._functions)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self._functions or isinstance(kwargs.get("generator"), torch.Generator):
            return func(*args, **kwargs)
        with _GLOBAL_STATE:
            before = torch_state()
            torch.set_rng_state(self._state)
            try:
                return func(*args, **kwargs)
            finally:
                self._state = torch_state()
                torch.set_rng_state(before)
