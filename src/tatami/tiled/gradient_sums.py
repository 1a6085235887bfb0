"""The forward pass of a tiled model, over stand-ins of the parameters, whose gradients are summed over the columns.

A layer reads its parameters as `self.weight`. Were those the parameters themselves, autograd would add this rank's part of each
gradient straight to its `.grad`: one by one, where one message to each neighbour is to carry all of them, and on top of earlier
backward passes, from whose sums over the columns it could no longer be told apart. So for the length of a forward pass a layer
finds a view of its parameter under that name. All views are made by one `_HorizontalSum`; autograd leads their gradients back
through it, where they meet, are added up over the columns, and go on to the parameters. When the pass ends, also by an error,
the layers have their parameters again: no optimizer or state dict sees a view.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from tatami.errors import ModelError
from tatami.tiled.blocks import Blocks
from tatami.tiled.context import RankContext
from tatami.tiled.departing import Departures, buckets_of
from tatami.tiled.following.exporting import line_of_error
from tatami.tiled.phases import IterationPhase, Phases
from tatami.tiled.placement import Placement
from tatami.tiled.rows import Rows
from tatami.tiled.same_batch import different_sizes
from tatami.tiled.stopwatch import LinkTimes
from tatami.tiled.weights_beside import WeightsBeside
from tatami.tiling.traffic import size_digits
from tatami.workload import Workload

_NO_LEAF = "Cannot assign non-leaf Tensor to parameter"
"""How torch begins to say that a parameter was to be made of a plain tensor."""


class GradientSums:
    """Those of one model.

    Args:
        module: the network, tiled.
        found: its blocks.
        rows: of every block, the tensors that hold its units here.
        workload: says how gradients travel, and which of them leave early.
        rank: what this rank's parts share.
        phases: the stopwatch.
        link_times: are told of the messages, where all leave together.
        placement: how the ranks lie now.
        columns: the ranks of each column now.
        run: the network's forward pass, over a sample that stands in where this rank has none and needs one.

    Attributes:
        parameters: of the network, each once.
        beside: what else the loss reads of them.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        found: Blocks,
        rows: Sequence[Sequence[Rows]],
        workload: Workload,
        rank: RankContext,
        phases: Phases,
        link_times: LinkTimes,
        placement: Callable[[], Placement],
        columns: Callable[[], list[list[int]]],
        run: Callable[[tuple[Any, ...], Mapping[str, Any]], Any],
    ) -> None:
        self._module, self._rows, self._rank = module, rows, rank
        self._wire, self._phases, self._link_times = workload.wire, phases, link_times
        self._placement, self._columns, self._run = placement, columns, run
        self.parameters = list(module.parameters())
        self._slots = [
            (owner, name, parameter)
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None
        ]
        self.beside = WeightsBeside(
            module,
            cut={name for block in found.blocks for name in block.cuts},
            layout=lambda: placement().layout,
            comm=rank.comm,
        )
        self._buckets = buckets_of(module, found=found, rows=rows, slots=self._slots, workload=workload)
        self._departing: Departures | None = None
        self._passes = 0
        for number, bucket in enumerate(self._buckets):
            for caller in bucket.callers:
                caller.register_forward_pre_hook(functools.partial(self._enter_bucket, number))
        if rank.comm is not None:
            for owner in {owner for owner, _, _ in self._slots}:
                owner.register_forward_pre_hook(_refuse_leaves)

    def forward(self, inputs: tuple[Any, ...], named_inputs: Mapping[str, Any]) -> Any:
        """The network's forward pass; its gradients come back as sums over all samples."""
        trained = tuple(parameter for parameter in self.parameters if parameter.requires_grad)
        if not trained:
            return self._run(inputs, named_inputs)
        placement = self._placement()
        if self._rank.comm is not None and torch.is_grad_enabled():
            self.beside.begin(trained)
        departing = self._departures(trained, placement)
        exchange = functools.partial(
            self._sum, trained, placement, self._rank.samples, departing, counts=self._rank.mine.size > 0
        )
        stand_ins = _HorizontalSum.apply(exchange, *trained)  # type: ignore[no-untyped-call]
        by_parameter = {id(p): s for p, s in zip(trained, stand_ins, strict=True)}
        for stand_in in stand_ins:
            # A slice of an nn.ParameterList would make new parameters of plain tensors, whose gradients are lost; of this it
            # cannot: torch raises `_NO_LEAF`.
            stand_in._is_param = True
        if departing is not None:
            departing.stand_ins = by_parameter
        for owner, name, parameter in self._slots:
            # nn.Module refuses a plain tensor as a parameter by setattr; torch.func.functional_call takes this way as well.
            owner._parameters[name] = by_parameter.get(id(parameter), parameter)
        self._departing = departing
        try:
            return self._run(inputs, named_inputs)
        except ValueError as error:
            if _NO_LEAF not in str(error):
                raise
            raise ModelError(
                f"{line_of_error(error)}the forward pass makes new parameters of those that the network has, as a slice of an "
                "nn.ParameterList does, and they would get no gradient. Take its elements one by one: self.w[i]"
            ) from error
        finally:
            if departing is not None:
                departing.stand_ins = {}  # which lead to the graph, and the graph leads to `departing`
            self._departing = None
            for owner, name, parameter in self._slots:
                owner._parameters[name] = parameter

    def _departures(self, trained: Sequence[nn.Parameter], placement: Placement) -> Departures | None:
        """Of a forward pass that begins; None where all gradients leave at the end."""
        if not placement.leaving:
            return None
        self._passes += 1
        return Departures(
            self._buckets,
            placement.leaving,
            trained={id(parameter) for parameter in trained},
            number=self._passes,
            phases=self._phases,
            holds=lambda: placement is self._placement(),
            counts=self._rank.mine.size > 0,
        )

    def _enter_bucket(self, number: int, owner: nn.Module, inputs: Any) -> None:  # noqa: ARG002 -- a forward pre-hook
        if self._departing is not None:
            self._departing.enter(number)

    def _sum(
        self,
        trained: Sequence[nn.Parameter],
        placement: Placement,
        samples: int,
        departing: Departures | None,
        grads: tuple[torch.Tensor | None, ...],
        *,
        counts: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        """Called by autograd when every parameter's gradient from this rank's samples is there; None for those without part.

        Where the rank has no samples, the gradients are those of one that stands in, and do not count.
        """
        if placement is not self._placement():
            raise ModelError(
                "the model was re-tiled between this forward pass and its backward pass; re-tile between two steps"
            )
        self._phases.enter(IterationPhase.HORIZONTAL)
        if placement.exchange is not None:
            self._refuse_sparse(trained, grads)
            came = {id(p): grad for p, grad in zip(trained, grads, strict=True)}
            if not counts:
                grads = (None,) * len(grads)
            left = frozenset() if departing is None else departing.trained
            by_parameter = {
                id(p): torch.zeros_like(p) if grad is None else grad.contiguous()
                for p, grad in zip(trained, grads, strict=True)
                if id(p) not in left
            }
            # A parameter without part in the loss has no gradient, which to an optimizer is not the same as one of 0. Where
            # the forward pass depends on the samples, it has part if it had on any rank.
            # Behind them, the number of samples of every column's batch, which each column fills in for itself, in digits.
            mine = size_digits(samples, wire=self._wire)
            digits = [[0] * len(mine) for _ in placement.tilings[0].columns]
            if self._rank.index is not None:
                digits[self._rank.index] = mine
            numbers = [*(float(grad is not None) for grad in grads), *(float(d) for own in digits for d in own)]
            told = torch.tensor(numbers, dtype=torch.float32, device="cpu").to(trained[0].device)
            tiled = {id(each.tensor) for block in self._rows for each in block}
            pairs = [
                [Rows(by_parameter[id(each.tensor)], each.runs) for each in block if id(each.tensor) in by_parameter]
                for block in self._rows
            ]
            replicated = {key: grad for key, grad in by_parameter.items() if key not in tiled}
            # Beside messages that have left before, none can be timed by itself.
            times = self._link_times if departing is None else None
            begun = placement.exchange.begin(pairs, [*replicated.values(), told], times=times)
            arrived: dict[int, torch.Tensor] = {}
            late: list[int] = []
            if departing is not None:
                arrived, late = departing.arrive(came)
            *sums, told = placement.exchange.finish(begun)
            self._refuse_late(late)
            heard = told.tolist()
            used, rest = heard[: len(grads)], heard[len(grads) :]
            sizes = [sum(d * 256**i for i, d in enumerate(rest[at : at + len(mine)])) for at in range(0, len(rest), len(mine))]
            if len(set(sizes)) > 1:
                raise different_sizes(sizes, columns=self._columns())
            by_parameter |= {**dict(zip(replicated, sums, strict=True)), **arrived}
            grads = tuple(by_parameter[id(p)] if part else None for p, part in zip(trained, used, strict=True))
        self._phases.enter(IterationPhase.UPDATE)
        if self._rank.comm is not None:
            self.beside.came(trained, grads)
        return grads

    def _refuse_late(self, late: Sequence[int]) -> None:
        name = next((name for name, own in self._module.named_parameters() if id(own) in late), None)
        if name is not None:
            raise ModelError(
                f"{name} is read before its module is called, so its gradient cannot leave when the backward pass is done with "
                "that module. Give tatami.tile bucket_bytes=None"
            )

    def _refuse_sparse(self, trained: Sequence[nn.Parameter], grads: Sequence[torch.Tensor | None]) -> None:
        for parameter, grad in zip(trained, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                name = next(name for name, own in self._module.named_parameters() if own is parameter)
                raise ModelError(f"the gradient of {name} is sparse, and is not summed over ranks. Set sparse=False")


class _HorizontalSum(torch.autograd.Function):
    """Hands parameters on to the layers; backward sums their gradients over all samples.

    Standing between the parameters and the layers, it has done its work when `loss.backward()` returns, it sees every gradient
    at once (one message for each neighbour), and gradients accumulate over several backward passes as they always do.
    """

    # With a `setup_context`, torch would look up the signature of `forward` in every call: some 0.1 ms of a core.
    @staticmethod
    def forward(
        ctx: Any, exchange: Callable[[tuple[torch.Tensor | None, ...]], Iterable[Any]], *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.exchange(grads)


def _refuse_leaves(owner: nn.Module, inputs: Any) -> None:  # noqa: ARG001 -- a forward pre-hook
    """Inside of the forward pass the parameters are stand-ins; a gradient that goes straight to a leaf would miss its sums."""
    if torch.is_grad_enabled() and any(p is not None and p.requires_grad and p.is_leaf for p in owner._parameters.values()):
        raise ModelError(
            f"a {type(owner).__name__} was called outside of its TiledModel's forward pass, where its gradient would not be "
            "summed over the ranks. Call the model that tatami.tile returned; torch.utils.checkpoint recomputes layers outside "
            "too and cannot be used here"
        )
