"""A mixture of experts: a list of modules that are alike, whose results are weighted and added, each for the rows sent to it.

Nothing needs to be known of the routing. An expert that is not here gives zeros, and what remains is the sum over those that
are; whether that is so is what the test of the block finds out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tatami.partition.parts.part_module import AbstractParts
from tatami.runtime.context import ModuleContext

FEWEST_EXPERTS = 2


@dataclass(frozen=True, kw_only=True)
class ExpertParts(AbstractParts):
    """A module with a list of experts.

    Attributes:
        experts: the names of the experts in the module, in their order.
        outputs: the length of the last axis of what an expert gives.
        tensors: of each expert, the names of its parameters in the module.
    """

    experts: tuple[str, ...]
    outputs: int
    tensors: tuple[tuple[str, ...], ...]

    def own(self) -> frozenset[str]:
        return frozenset(name for names in self.tensors for name in names)

    @contextmanager
    def with_units(self, module: nn.Module, context: ModuleContext) -> Iterator[None]:
        here = [units().size > 0 for units in context.units]
        absent = [module.get_submodule(name) for name, there in zip(self.experts, here, strict=True) if not there]
        try:
            for expert in absent:
                expert.__dict__["forward"] = functools.partial(self._nothing, expert)
            yield
        finally:
            for expert in absent:
                del expert.__dict__["forward"]

    def _nothing(self, expert: nn.Module, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """What an expert gives that is somewhere else."""
        zeros = x.new_zeros((*x.shape[:-1], self.outputs))
        # Of its parameters there is no element here. They have a gradient, of no element, where they have one elsewhere.
        nothing = torch.stack([parameter.sum() for parameter in expert.parameters()]).sum()
        return zeros + nothing.to(zeros.dtype)


def expert_lists(module: nn.Module) -> Sequence[str]:
    """The names of the lists of modules right inside of `module` that are alike: the same class, the same parameters.

    Norms, which have no matrix, are no experts.
    """
    found = []
    for name, child in module.named_children():
        if not isinstance(child, nn.ModuleList) or len(child) < FEWEST_EXPERTS:
            continue
        kinds = {
            (type(expert), tuple((leaf, tuple(p.shape), p.dtype, p.requires_grad) for leaf, p in expert.named_parameters()))
            for expert in child
        }
        if len(kinds) == 1 and any(p.dim() > 1 for p in child[0].parameters()) and not any(True for _ in child.buffers()):
            found.append(name)
    return found
