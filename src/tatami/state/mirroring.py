"""A mirror: a rank's copy of a neighbour's weights, which applies the same updates, so that they outlive the neighbour.

The copies are parameters of the same optimizer, in the groups of those that they are copies of: whatever a schedule does to a
group happens to both, and one `step` updates both. Optimizers that tiled models take work element by element, so that equal
gradients and equal states give equal values, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from tatami.comm.checked import as_bytes
from tatami.comm.elastic import ElasticCommunicator
from tatami.runtime.row_messages import unpack
from tatami.tiling import Span

_TAG = 13


@dataclass(kw_only=True)
class MirrorTensors:
    """What one rank keeps for another; `tatami.state.transfer` fills it.

    Attributes:
        tensors: copies, by the names of the network; what both ranks have the same units of is not copied.
        units: of each, which are here; one that has no units is one unit.
        given: this rank's own tensors of which another one keeps copies, by their names.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    units: dict[str, Span] = field(default_factory=dict)
    given: dict[str, torch.Tensor] = field(default_factory=dict)

    def exchange(self, comm: ElasticCommunicator, *, keeper: int, owner: int) -> None:
        """Give this rank's gradients to its keeper, and take those of the rank that this one keeps.

        Tensors that are no parameters, as running statistics, change in the forward pass: their values are given.
        """
        kept = [self.tensors[name] for name in sorted(self.tensors)]
        given, has_grad = _values([self.given[name] for name in sorted(self.given)])
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
