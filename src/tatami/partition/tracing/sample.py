"""A few samples that a network is run over before it is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tatami.errors import InputError

FEWEST = 2
"""torch.export takes a length of 1 for a constant."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A batch of inputs, for following a network.

    Attributes:
        args, kwargs: of the network.
        samples: in the batch.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    samples: int

    @classmethod
    def of(cls, batch: Any) -> Sample:
        """From a tensor (samples, ...), a tuple or list of positional arguments, or a mapping of named ones.

        Raises:
            InputError: no tensor in it, or fewer than two samples.
        """
        if isinstance(batch, Mapping):
            args, kwargs = (), dict(batch)
        else:
            args, kwargs = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}
        lengths = [
            leaf.shape[0] for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()
        ]
        if not lengths or lengths[0] < FEWEST:
            raise InputError(
                f"a sample batch must have tensors of at least {FEWEST} samples on their first axis; this one has "
                f"{lengths[0] if lengths else 'no tensor'}"
            )
        return cls(args=args, kwargs=kwargs, samples=lengths[0])

    def part(self, samples: int) -> Sample:
        """The first `samples` of it."""
        return self._with(samples, lambda leaf: leaf[:samples])

    def of_size(self, samples: int) -> Sample:
        """So many samples: the first of it, or all of it again and again."""
        times = -(-samples // self.samples)
        return self._with(samples, lambda leaf: torch.cat([leaf] * times)[:samples] if times > 1 else leaf[:samples])

    def at(self, places: Sequence[int]) -> Sample:
        """The samples at these places, each as often as it is named."""
        return self._with(len(places), lambda leaf: leaf[list(places)])

    def with_one_more(self) -> Sample:
        """The same, and the first sample again."""
        return self._with(self.samples + 1, lambda leaf: torch.cat([leaf, leaf[:1]]))

    def other(self, *, noise: bool) -> Sample:
        """As many other samples: the first in place of the last, and with `noise` other floating point numbers."""
        generator = torch.Generator().manual_seed(1)

        def change(leaf: torch.Tensor) -> torch.Tensor:
            changed = torch.cat([leaf[:-1], leaf[:1]])
            if noise and leaf.is_floating_point():
                drawn = torch.rand(leaf.shape, generator=generator, dtype=torch.float32, device="cpu").to(leaf)
                changed = changed * (0.5 + drawn) + 0.1 * drawn
            return changed

        return self._with(self.samples, change)

    def _with(self, samples: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Sample:
        """`change` is done to all tensors that have samples, which are `samples` then."""

        def changed(leaf: Any) -> Any:
            shares = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == self.samples
            return change(leaf) if shares else leaf

        args, kwargs = pytree.tree_map(changed, (self.args, dict(self.kwargs)))
        return Sample(args=args, kwargs=kwargs, samples=samples)
