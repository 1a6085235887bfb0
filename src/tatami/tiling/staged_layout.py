"""Replicas that are divided into pipeline stages: which ranks compute which pieces of the network."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

from tatami.errors import PlanError
from tatami.tiling.layout import Layout


@dataclass(frozen=True, kw_only=True)
class StagedLayout:
    """Every replica computes its samples in consecutive stages, each of contiguous pieces of the network.

    All replicas are divided at the same pieces, so that the ranks of one stage, over all replicas, are a layout by themselves:
    they hold the same weights, and sum their gradients among themselves. Stages exchange activations and their gradients.

    Attributes:
        stages: for each stage, who computes it: one replica for each replica, in the same order, with the same share of the
            samples and the same number of micro-batches in all stages.
        cuts: the number of the first piece of each stage but the first, ascending.
    """

    stages: tuple[Layout, ...]
    cuts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.stages or len(self.cuts) != len(self.stages) - 1:
            raise PlanError(f"{len(self.stages)} stages need {len(self.stages) - 1} cuts, not {self.cuts}")
        if any(not one < other for one, other in pairwise((0, *self.cuts))):
            raise PlanError(f"cuts must ascend from 1 on, not {self.cuts}")
        shares = {tuple((replica.width, replica.micro_batches) for replica in stage.replicas) for stage in self.stages}
        if len(shares) > 1:
            raise PlanError("each replica has the same share of the samples, in as many micro-batches, in all stages")
        for stage in self.stages:
            if stage.recomputes and (keeping := set(stage.processors).difference(stage.recomputes)):
                raise PlanError(
                    f"{stage.recomputes[0]} is to recompute activations, and {min(keeping)} of the same stage is not: "
                    "have all ranks of a stage recompute, or none"
                )
        if len(set(self.processors)) < len(self.processors):
            raise PlanError("each processor has one place in the layout; one has several stages")

    @cached_property
    def processors(self) -> tuple[str, ...]:
        """All names, stage by stage."""
        return tuple(chain.from_iterable(stage.processors for stage in self.stages))

    @property
    def num_replicas(self) -> int:
        return len(self.stages[0].replicas)

    def stage_of(self, processor: str) -> int | None:
        """The stage that `processor` computes; None where it has no place."""
        return next((index for index, stage in enumerate(self.stages) if processor in stage.processors), None)

    def renamed(self, names: Mapping[str, str]) -> StagedLayout:
        """The same with other processors in the places of those that are in `names`."""
        return StagedLayout(stages=tuple(stage.renamed(names) for stage in self.stages), cuts=self.cuts)

    def in_micro_batches(self, number: int) -> StagedLayout:
        """The same stages, every replica in this number of micro-batches."""
        return StagedLayout(stages=tuple(stage.in_micro_batches(number) for stage in self.stages), cuts=self.cuts)

    @cached_property
    def recomputes(self) -> tuple[str, ...]:
        """The processors that recompute their activations."""
        return tuple(chain.from_iterable(stage.recomputes for stage in self.stages))

    def recomputing(self, stages: Collection[int]) -> StagedLayout:
        """The same shares, where the ranks of these stages recompute their activations, and others do not."""
        laid = (stage.recomputing() if number in stages else stage.keeping for number, stage in enumerate(self.stages))
        return StagedLayout(stages=tuple(laid), cuts=self.cuts)

    def to_dict(self) -> dict[str, Any]:
        return {"stages": [stage.to_dict() for stage in self.stages], "cuts": list(self.cuts)}

    def to_json(self) -> str:
        """One line of JSON; `from_json` reads it back, bit for bit."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> StagedLayout:
        """Read what `to_dict` gives.

        Raises:
            PlanError: a key is missing, or the shares are invalid.
        """
        try:
            return cls(stages=tuple(map(Layout.from_dict, raw["stages"])), cuts=tuple(map(int, raw["cuts"])))
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"not a layout with stages: {error!r}; StagedLayout.to_json writes it") from error

    @classmethod
    def from_json(cls, text: str) -> StagedLayout:
        """Read what `to_json` wrote. Raises as `from_dict`."""
        try:
            return cls.from_dict(json.loads(text))
        except json.JSONDecodeError as error:
            raise PlanError(f"not the JSON of a layout: {error!r}; StagedLayout.to_json writes it") from error
