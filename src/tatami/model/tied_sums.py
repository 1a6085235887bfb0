"""Gradients of weights that several pipeline stages read (tied embedding and head), summed over these stages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from tatami.gradients.base import AbstractGradientSums
from tatami.model.model_stage import ModelStage
from tatami.runtime.sharded_sums import ShardedSums


class TiedSums(AbstractGradientSums):
    """Sums over the replicas first, and then the sums of tied weights over the stages.

    Args:
        replicas: sums over the replicas; None where there is one.
        stage: of this rank.
        names: of the parameters.
    """

    def __init__(self, replicas: AbstractGradientSums | None, *, stage: ModelStage, names: Mapping[nn.Parameter, str]) -> None:
        self._replicas, self._stage, self._names = replicas, stage, names

    @property
    def layout(self) -> object:
        return self._stage if self._replicas is None else self._replicas.layout

    @property
    def are_needed(self) -> bool:
        return True

    @property
    def shares_units(self) -> bool:
        return self._replicas is not None and self._replicas.shares_units

    def finish(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None], *, weight: float, samples: int
    ) -> list[torch.Tensor | None]:
        if self._replicas is not None and self._replicas.are_needed:
            sums = self._replicas.finish(parameters, gradients, weight=weight, samples=samples)
        else:
            sums = [None if grad is None else grad.mul_(weight) for grad in gradients]
        places = {self._names[parameter]: place for place, parameter in enumerate(parameters)}
        tied = {name: places[name] for name in self._stage.tied if name in places}
        if not isinstance(self._replicas, ShardedSums):
            for name, total in self._stage.sum_tied({name: sums[place] for name, place in tied.items()}).items():
                sums[tied[name]] = total
            return sums
        shard_of = self._replicas.part
        # A copy, which may still be on its way when the sum takes its place.
        parts = {
            name: None if (whole := sums[place]) is None else shard_of(parameters[place], whole).clone()
            for name, place in tied.items()
        }
        for name, total in self._stage.sum_tied(parts).items():
            parameter, whole = parameters[tied[name]], sums[tied[name]]
            if total is not None:
                whole = torch.full_like(parameter, math.nan, requires_grad=False) if whole is None else whole
                shard_of(parameter, whole).copy_(total)
                sums[tied[name]] = whole
        return sums
