"""A mirror: a rank's copy of a neighbour's units, which applies the same updates, so that they outlive the neighbour.

The copies are parameters of the same optimizer, in the groups of those that they are copies of: whatever a schedule does to a
group happens to both, and one `step` updates both. Optimizers that tiled models take work element by element, so that equal
gradients and equal states give equal rows, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tatami.comm.checked import as_bytes
from tatami.comm.elastic import ElasticCommunicator
from tatami.tiled.carrying import room_for, unpack
from tatami.tiled.model import TiledModel
from tatami.tiled.rows import Rows

_TAG = 13


class MirrorRows:
    """What one rank keeps for another: for each block, copies of its tensors that hold units.

    Args:
        model: whose tensors are copied.
        optimizer: that updates them.

    Attributes:
        blocks: as `TiledModel.block_rows`; of no units until a change fills them.
    """

    def __init__(self, model: TiledModel, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self.blocks = [[Rows(_copy_of_nothing(rows), rows.runs) for rows in block] for block in model.block_rows()]

    @property
    def tensors(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of what is this rank's own and its place in the mirror."""
        return [
            (own.tensor, kept.tensor)
            for owned, mirrored in zip(self._model.block_rows(), self.blocks, strict=True)
            for own, kept in zip(owned, mirrored, strict=True)
        ]

    def attach(self) -> None:
        """Have the optimizer update the mirror as well."""
        copies = {id(own): kept for own, kept in self.tensors}
        for group in self._optimizer.param_groups:
            there = {id(parameter) for parameter in group["params"]}
            group["params"] += [
                copy for p in list(group["params"]) if (copy := copies.get(id(p))) is not None and id(copy) not in there
            ]

    def detach(self) -> None:
        """Have the optimizer forget the mirror."""
        copies = {id(kept) for _, kept in self.tensors}
        for group in self._optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in copies]
        for _, kept in self.tensors:
            self._optimizer.state.pop(kept, None)

    def exchange(self, comm: ElasticCommunicator, *, keeper: int, owner: int) -> None:
        """Give the gradients of this rank's units to its keeper, and take those of the rank that this one keeps.

        Tensors that are no parameters, as running statistics, change in the forward pass: their values are given.
        """
        own = [tensor for tensor, _ in self.tensors]
        kept = [tensor for _, tensor in self.tensors]
        given, has_grad = _values(own)
        came = [torch.empty_like(tensor) for tensor in kept]
        told = torch.empty(len(kept), dtype=torch.uint8, device="cpu")
        bundle = torch.cat([as_bytes(each.contiguous()) for each in (has_grad, *given)])
        room = has_grad.new_empty(len(told) + sum(each.numel() * each.element_size() for each in came))
        requests = [comm.irecv(room, owner, tag=_TAG), comm.isend(bundle, keeper, tag=_TAG)]
        for request in requests:
            request.wait()
        unpack(room, [told, *came])
        for tensor, value, flag in zip(kept, came, told.tolist(), strict=True):
            if not isinstance(tensor, nn.Parameter):
                tensor.copy_(value)
            else:
                tensor.grad = value if flag else None


def _values(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    values, has_grad = [], []
    for tensor in tensors:
        is_parameter = isinstance(tensor, nn.Parameter)
        has_grad.append(is_parameter and tensor.grad is not None)
        value = tensor.grad if is_parameter else tensor
        values.append(torch.zeros_like(tensor) if value is None else value.detach())
    return values, torch.tensor(has_grad, dtype=torch.uint8, device="cpu")


def _copy_of_nothing(rows: Rows) -> torch.Tensor:
    empty = room_for(rows, units=0)
    return nn.Parameter(empty, rows.tensor.requires_grad) if isinstance(rows.tensor, nn.Parameter) else empty
