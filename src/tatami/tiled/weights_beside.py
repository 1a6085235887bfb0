"""Weights that a loss reads beside the network, as a penalty on them does, where a rank has some of their units only.

What is a sum over elements, as the square of the 2-norm, has the right gradient there. The norm itself has another one, and the
value of either is of this rank's units. Which of them a loss takes cannot be seen; that it takes any can: such a gradient comes
to the parameter beside that which was summed over the ranks. Where all ranks have the whole weight, it must be the same on all
of them: what depends on samples, as a temperature that outputs are divided by, would have to be summed, and is not.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.tiling import Layout

_LOOKS: Final = 8
"""The first backward passes are looked at, for a loss takes what it takes from the beginning;"""
_EVERY: Final = 50
"""and then one of so many, for terms that begin later: a look costs a call for each parameter."""
_SAME = 1e-4
"""Of the sum of sizes: ranks round alike, but not where their processors differ."""


class WeightsBeside:
    """Those of one model.

    Args:
        module: the network, tiled.
        cut: the names of the parameters of which a rank may have some units only.
        layout: how the ranks lie now.
        comm: all ranks; None where the rank is alone.

    Attributes:
        warns: whether this rank warns, for all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        cut: Collection[str],
        layout: Callable[[], Layout],
        comm: AbstractCommunicator | None,
    ) -> None:
        self._names: Mapping[nn.Parameter, str] = {parameter: name for name, parameter in module.named_parameters()}
        self._cut, self._layout, self._comm = frozenset(cut), layout, comm
        self.warns = comm is not None and comm.rank == 0
        self._passes = 0
        self._handles: dict[nn.Parameter, Any] = {}
        self._came: dict[nn.Parameter, list[torch.Tensor]] = {}
        self._read: dict[str, None] = {}
        self._found: dict[str, tuple[float, float]] = {}

    def begin(self, trained: Sequence[nn.Parameter]) -> None:
        """A forward pass begins over these parameters. Collective where the one before has found something.

        Raises:
            InputError: on all ranks: what came to a parameter that all have whole differed between them.
        """
        self._came.clear()
        if self._found:
            self._compare()
        looks = self._passes < _LOOKS or self._passes % _EVERY == 0
        if looks and not self._handles:
            for parameter in trained:
                # Where others have hooks, what comes to ours is not what was summed.
                if not parameter._backward_hooks:
                    look = functools.partial(self._look, parameter)
                    self._handles[parameter] = parameter.register_hook(look)  # type: ignore[no-untyped-call]
        elif self._handles and not looks:
            for handle in self._handles.values():
                handle.remove()
            self._handles.clear()

    def came(self, trained: Sequence[nn.Parameter], grads: Sequence[torch.Tensor | None]) -> None:
        """These gradients were summed over the ranks, and are on their way to the parameters."""
        self._passes += 1
        if self._handles:
            for parameter, grad in zip(trained, grads, strict=True):
                if grad is not None and parameter in self._handles:
                    # While they are held, autograd does not add to them in place.
                    self._came.setdefault(parameter, []).append(grad)

    def refuse(self, where: str, *, is_sum: bool) -> None:
        """
        Args:
            where: what tells the value of the loss, in which such a term would be wrong.
            is_sum: whether the loss is one over samples, to which every column adds the term.

        Raises:
            InputError: there is such a term. The same on all ranks.
        """
        if not self._read:
            return
        name = self._read_in_parts()
        if name is None and not (is_sum and len(self._layout().columns) > 1):
            return
        why = "and every column adds that term to the sum" if name is None else "of which a rank has some units only"
        raise InputError(
            f"the loss reads {name or next(iter(self._read))} beside the network's forward pass, as a penalty does, {why}: "
            f"{where} would tell a wrong loss. Use the optimizer's weight_decay, which is exact; or a loop of your own, where "
            "the gradient of a sum over elements is"
        )

    def _look(self, parameter: nn.Parameter, grad: torch.Tensor | None) -> None:
        summed = self._came.pop(parameter, [])
        if grad is None:  # no part in the loss
            return
        # Of two forward passes before one backward pass, the sum comes.
        if len(summed) < 2 and not any(grad is each for each in summed):
            if (name := self._names[parameter]) not in self._read:
                beside = (grad - summed[0] if summed else grad).double()
                self._found[name] = float(beside.sum()), float(beside.abs().sum())
            self._read[name] = None
            if self.warns and (cut := self._read_in_parts()) is not None:
                self.warns = False
                warnings.warn(
                    f"the loss reads {cut} beside the network's forward pass, and a rank has some of its units only: the "
                    "gradient of a sum over elements (weight.square().sum()) is exact, that of anything else (weight.norm()) "
                    "is not, and the value is of this rank's units",
                    stacklevel=2,
                )

    def _compare(self) -> None:
        in_parts = self._cut if self._lies_in_parts else frozenset()
        mine = {name: told for name, told in self._found.items() if name not in in_parts}
        self._found = {}
        if not mine or self._comm is None or self._comm.changes:  # ranks that have joined have found nothing
            return
        everywhere = self._comm.allgather_object(mine)
        for name, (total, size) in mine.items():
            others = [told.get(name, (0.0, 0.0)) for told in everywhere]
            if any(abs(other - total) > _SAME * max(size, other_size) for other, other_size in others):
                raise InputError(
                    f"the loss reads {name} beside the network's forward pass, and its gradient from there differs between the "
                    f"ranks ({', '.join(f'{other:.4g}' for other, _ in others)} in all), as where samples decide it; nothing "
                    "sums it. Read it inside of the network's forward pass"
                )

    @property
    def _lies_in_parts(self) -> bool:
        return any(len(column.processors) > 1 for column in self._layout().columns)

    def _read_in_parts(self) -> str | None:
        return next((name for name in self._read if name in self._cut), None) if self._lies_in_parts else None
