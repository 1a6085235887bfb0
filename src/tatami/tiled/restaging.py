"""Carry a re-tiling to other pipeline stages out: the weights of the network move from rank to rank, whole or in units.

Every rank tells the others of which units of which tensors it has the values now and will have them, and what the optimizers
keep for them. From that, all know who takes what from whom (`tatami.retiling.takes`). A parameter that comes or goes keeps its
identity: what was a stand-in is a tensor from then on, or the other way round, so that optimizers, and lists of parameters
that the user keeps, go on as if nothing had happened.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tatami.comm.agreement import all_or_none
from tatami.errors import ModelError, PlanError
from tatami.gradients.parameter_hooks import copy_hooks
from tatami.retiling.takes import TensorTake, tensor_takes
from tatami.same_steps import optimizers_of
from tatami.stages.stand_in import StandIn
from tatami.tiled.carrying import Moved, carry, counted_from, elementwise, put, room_for, units_of
from tatami.tiled.model import Seat, TiledModel
from tatami.tiled.rows import Rows, UnitRuns
from tatami.tiling import Layout, Span, StagedLayout

_TAG = 19
_ALL = Span(0, 1)
"""The units of a tensor that has none: it is whole wherever it is."""
_Key = tuple[int, str]
"""What there is for a tensor: an optimizer's number, and the key of its state; or one of the following."""
_VALUE, _GRADIENT = (-2, "value"), (-1, "gradient")


@dataclass(frozen=True, kw_only=True)
class _Holding:
    """What a rank tells the others.

    Attributes:
        held, needed: the units of each tensor that it has now, and is to have.
        kinds: for each tensor that it has, the dtype of all that moves with its units.
        settings: for each of them, the rest of the optimizers' states, such as their numbers of steps.
    """

    held: dict[str, Span]
    needed: dict[str, Span]
    kinds: dict[str, dict[_Key, torch.dtype]]
    settings: dict[str, dict[_Key, Any]]


def restage(
    model: TiledModel,
    layout: Layout | StagedLayout,
    *,
    optimizer: torch.optim.Optimizer | None,
    companions: Mapping[torch.Tensor, torch.Tensor] | None = None,
) -> Moved:
    """As `tatami.tiled.move`, from or to pipeline stages. Collective; the layout is the same on all ranks.

    Raises:
        ModelError: on all ranks, and nothing is changed: the model cannot be divided so, or something holds on to what moves.
        PlanError: on all ranks, and nothing is changed: the layout does not fit the ranks or the network.
    """
    _refuse(model, layout, companions)
    network = _Network(model, optimizer)
    seat = _seat(model, layout, network)
    try:
        mine = network.holding(seat)
        swapped = [each for name, each in network.tensors.items() if (name in mine.held) is not (name in mine.needed)]
        model._gradients.leave()
        all_or_none(model.comm, lambda: _refuse_held(swapped, network), what="the re-tiling cannot be done:", error=ModelError)
        everyone: list[_Holding] = model.comm.allgather_object(mine)
        sizes = {name: float(network.wholes[name].numel()) / max(network.units[name], 1) for name in network.tensors}
        takes = tensor_takes([each.held for each in everyone], [each.needed for each in everyone], unit_sizes=sizes)
        with torch.no_grad():
            laid, sent_bytes = network.fetch(takes, everyone)
        # A rank for which something did not come does not come here either, so that all ranks change their stages or none.
        model.comm.barrier()
    except BaseException:
        model._gradients.enter()
        raise
    model._leave()
    _take_plain_forwards(model)
    with torch.no_grad():
        network.put_in_place(laid, mine, settings=_settings(everyone))
    model._past_engine = model._gradients
    model._enter(seat, model.module, cuts=False)
    return Moved(num_units=sum(take.units.size for take in takes), sent_bytes=sent_bytes)


def _refuse(model: TiledModel, layout: Layout | StagedLayout, companions: Mapping[torch.Tensor, torch.Tensor] | None) -> None:
    def look() -> None:
        if isinstance(layout, StagedLayout) and model.staged is None:
            raise ModelError(
                "this model does not know the pieces that stages share out: give tatami.tile a sample and the default planner, "
                "or the layout with stages"
            )
        if model.sharding is not None:
            raise ModelError("a model with sharded_optimizer=True cannot be moved to pipeline stages yet")
        if companions:
            raise ModelError("tensors beside the weights (companions) cannot be moved to or from pipeline stages yet")
        if model._gradients.in_parts:
            raise ModelError("re-tile between two steps, not inside of the loop over model.micro_batches(...)")
        for name, module in model.module.named_modules():
            if vars(module).get("forward") is not model._own_forwards.get(module):
                raise ModelError(
                    f"the forward of {name or 'the network'} was replaced after tatami.tile, which would be lost with the "
                    "stages. Replace it before the network is tiled"
                )

    all_or_none(model.comm, look, what="the re-tiling cannot be done:", error=ModelError)


def _seat(model: TiledModel, layout: Layout | StagedLayout, network: _Network) -> Seat:
    """This rank's place in the layout. Collective."""
    found = model.found if model.staged is None else model.staged.found
    stage, own = None, layout
    if isinstance(layout, StagedLayout):
        assert model.staged is not None
        stage = model.staged.stage(
            model.comm, layout, cluster=model.cluster, generator=model.generator, phases=model.phases, plan=None
        )
        stage.follow(model.module)
        try:
            found, own = stage.blocks_of(found), stage.own_layout
        except PlanError:  # on all ranks
            stage.close()
            raise
    assert isinstance(own, Layout)
    with network.shown(None if stage is None else stage.has):
        return model._seat(model.module, stage=stage, found=found, layout=own)


class _Network:
    """The tensors of a model, wherever they are, and what goes with them.

    Attributes:
        tensors: parameters and buffers by their first names; stand-ins for those that are not here.
        cuts: where the units of a tensor lie that can be divided into units, in the whole network.
        wholes: without memory, in their whole shapes.
        units: how many units each has; 1 where it is not divided.
    """

    def __init__(self, model: TiledModel, optimizer: torch.optim.Optimizer | None) -> None:
        self._model = model
        self._optimizers = list(optimizers_of(model.parameters()))
        if optimizer is not None and optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        module = model.module
        self.tensors: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                self.tensors[name] = tensor
        found = model.found if model.staged is None else model.staged.found
        self.cuts: dict[str, UnitRuns] = {name: runs for block in found.blocks for name, runs in block.cuts.items()}
        self._sliced = _sliced(model.found.blocks)
        self.wholes = {name: self._whole(name, tensor) for name, tensor in self.tensors.items()}
        self.units = {name: Rows(each, self.cuts[name]).units if name in self.cuts else 1 for name, each in self.wholes.items()}

    def _whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if name in self._sliced:
            return room_for(Rows(whole, self.cuts[name]), units=self._model.tilings[self._sliced[name]].units)
        return whole

    @contextmanager
    def shown(self, has: Any) -> Iterator[None]:
        """Meanwhile the network shows tensors of whole shapes without memory: of this rank's new stage, and else stand-ins."""
        shown: dict[int, torch.Tensor] = {}
        for name, tensor in self.tensors.items():
            whole = self.wholes[name]
            made = whole if has is None or has(name) else self._stand_in(name)
            is_parameter = isinstance(tensor, nn.Parameter)
            shown[id(tensor)] = nn.Parameter(made, requires_grad=tensor.requires_grad) if is_parameter else made
        before = [(held, dict(held)) for held in self._holders()]
        for held, own in before:
            held.update({name: shown[id(tensor)] for name, tensor in own.items() if tensor is not None})
        try:
            yield
        finally:
            for held, own in before:
                held.update(own)

    def _holders(self) -> Iterator[dict[str, Any]]:
        for module in self._model.module.modules():
            yield module._parameters
            yield module._buffers

    def _stand_in(self, name: str) -> StandIn:
        return StandIn(self.wholes[name], device=self._model.device)

    def holding(self, seat: Seat) -> _Holding:
        """What this rank has, and will have in `seat`."""
        model, after = self._model, _sliced(seat.found.blocks)
        held, needed = {}, {}
        kinds: dict[str, dict[_Key, torch.dtype]] = {}
        settings: dict[str, dict[_Key, Any]] = {}
        for name, tensor in self.tensors.items():
            every = Span(0, self.units[name])
            if not isinstance(tensor, StandIn):
                sliced = self._sliced.get(name)
                held[name] = every if sliced is None else units_of(model.tilings[sliced], model.name)
                kinds[name] = {key: each.dtype for key, each in self._parts(tensor).items()}
                settings[name] = {
                    (number, key): value
                    for number, optimizer in enumerate(self._optimizers)
                    for key, value in optimizer.state.get(tensor, {}).items()
                    if (number, key) not in kinds[name]
                }
            if seat.stage is None or seat.stage.has(name):
                block = after.get(name)
                needed[name] = every if block is None else units_of(seat.placement.tilings[block], model.name)
        return _Holding(held=held, needed=needed, kinds=kinds, settings=settings)

    def _parts(self, tensor: torch.Tensor) -> dict[_Key, torch.Tensor]:
        """A tensor with all that has a value for each of its elements."""
        parts: dict[_Key, torch.Tensor] = {_VALUE: tensor}
        if isinstance(tensor, nn.Parameter) and tensor.grad is not None:
            parts[_GRADIENT] = tensor.grad
        for number, optimizer in enumerate(self._optimizers):
            parts |= {(number, key): each for key, each in elementwise(optimizer, tensor).items()}
        return parts

    def fetch(self, takes: tuple[TensorTake, ...], everyone: list[_Holding]) -> tuple[dict[str, dict[_Key, torch.Tensor]], int]:
        """What this rank is to have of the tensors of which it has something else now; and the bytes that it sent."""
        me, mine = self._model.comm.rank, everyone[self._model.comm.rank]
        kinds = _kinds(everyone)
        laid: dict[str, dict[_Key, torch.Tensor]] = {}
        for name, units in mine.needed.items():
            before = mine.held.get(name)
            if before == units:
                continue
            laid[name] = {key: self._room(name, units=units, dtype=dtype) for key, dtype in kinds[name].items()}
            if before is not None:
                parts = self._parts(self.tensors[name])
                for key, room in laid[name].items():
                    kept = before & units
                    for target, source in zip(
                        self._cut(name, room, counted_from(units, kept)),
                        self._cut(name, parts[key], counted_from(before, kept)),
                        strict=True,
                    ):
                        target.copy_(source)
        incoming: dict[int, list[torch.Tensor]] = {}
        outgoing: dict[int, list[torch.Tensor]] = {}
        for take in takes:
            if take.dest == me:
                here = counted_from(mine.needed[take.name], take.units)
                parts = laid[take.name]
                views = [view for key in sorted(parts) for view in self._cut(take.name, parts[key], here)]
                incoming.setdefault(take.source, []).extend(views)
            if take.source == me:
                here = counted_from(mine.held[take.name], take.units)
                parts = self._parts(self.tensors[take.name])
                views = [view for key in sorted(kinds[take.name]) for view in self._cut(take.name, parts[key], here)]
                outgoing.setdefault(take.dest, []).extend(views)
        return laid, carry(self._model.comm, incoming=incoming, outgoing=outgoing, tag=_TAG)

    def _room(self, name: str, *, units: Span, dtype: torch.dtype) -> torch.Tensor:
        whole, device = self.wholes[name], self._model.device
        like = torch.empty(whole.shape, dtype=dtype, device="meta")
        if name not in self.cuts:
            return torch.empty(whole.shape, dtype=dtype, device=device)
        return torch.empty(room_for(Rows(like, self.cuts[name]), units=units.size).shape, dtype=dtype, device=device)

    def _cut(self, name: str, tensor: torch.Tensor, units: Span) -> tuple[torch.Tensor, ...]:
        if name in self.cuts:
            return Rows(tensor.detach(), self.cuts[name]).cut(units)
        return (tensor.detach(),) if units.size else ()

    def put_in_place(
        self, laid: dict[str, dict[_Key, torch.Tensor]], mine: _Holding, *, settings: dict[str, dict[_Key, Any]]
    ) -> None:
        """Give the network what was fetched, and take away what is not to be here any more."""
        for name, tensor in self.tensors.items():
            if name in mine.held and name not in mine.needed:
                self._release(name, tensor)
            elif name in laid and name in mine.held:
                parts = self._parts(tensor)
                for key in sorted(laid[name], reverse=True):  # what is recognized by the shape of the value goes first
                    put(parts[key], laid[name][key])
            elif name in laid:
                self._receive(tensor, laid[name], settings.get(name, {}))

    def _release(self, name: str, tensor: torch.Tensor) -> None:
        shown = self._stand_in(name)
        if isinstance(tensor, nn.Parameter):
            for optimizer in self._optimizers:
                optimizer.state.pop(tensor, None)
            _swap(tensor, nn.Parameter(shown, requires_grad=tensor.requires_grad))
        else:
            self._replace(tensor, shown)

    def _receive(self, tensor: torch.Tensor, parts: dict[_Key, torch.Tensor], settings: dict[_Key, Any]) -> None:
        value = parts.pop(_VALUE)
        if not isinstance(tensor, nn.Parameter):
            self._replace(tensor, value)
            return
        _swap(tensor, nn.Parameter(value, requires_grad=tensor.requires_grad))
        tensor.grad = parts.pop(_GRADIENT, None)
        for (number, key), each in (*settings.items(), *parts.items()):
            own = each.clone() if isinstance(each, torch.Tensor) and (number, key) not in parts else each
            self._optimizers[number].state[tensor][key] = own

    def _replace(self, buffer: torch.Tensor, by: torch.Tensor) -> None:
        for held in self._holders():
            for name, tensor in held.items():
                if tensor is buffer:
                    held[name] = by


def _kinds(everyone: list[_Holding]) -> dict[str, dict[_Key, torch.dtype]]:
    """What moves with the units of each tensor.

    Raises:
        ModelError: on all ranks: ranks that have the same tensor keep other things for it.
    """
    found: dict[str, dict[_Key, torch.dtype]] = {}
    for rank, each in enumerate(everyone):
        for name, kinds in each.kinds.items():
            if found.setdefault(name, kinds) != kinds:
                raise ModelError(
                    f"rank {rank} keeps {_words(kinds)} for {name}, and another rank {_words(found[name])}: re-tile between "
                    "two steps, with the same optimizers on all ranks"
                )
    return found


def _words(kinds: Mapping[_Key, torch.dtype]) -> str:
    return ", ".join(f"{key} ({dtype})" for (_, key), dtype in kinds.items())


def _settings(everyone: list[_Holding]) -> dict[str, dict[_Key, Any]]:
    """What the first rank that has a tensor says of it."""
    found: dict[str, dict[_Key, Any]] = {}
    for each in everyone:
        found = {**each.settings, **found}
    return found


def _sliced(blocks: Any) -> dict[str, int]:
    """The block of each tensor that is divided into units."""
    return {name: index for index, block in enumerate(blocks) for name in block.cuts}


def _swap(parameter: nn.Parameter, by: nn.Parameter) -> None:
    """Make of a parameter, with its identity and the hooks of its users, what `by` is."""
    given: Any = parameter
    torch.utils.swap_tensors(parameter, by)  # type: ignore[no-untyped-call]
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(given, hooks, None):
            setattr(given, hooks, getattr(given, hooks))  # torch knows them by the tensor that was there


def _refuse_held(tensors: list[torch.Tensor], network: _Network) -> None:
    """Whether all that has to change can: torch does not make another tensor of one that something else refers to."""
    for tensor in tensors:
        if isinstance(tensor, nn.Parameter) and weakref.getweakrefs(tensor):
            name = next(name for name, own in network.tensors.items() if own is tensor)
            raise ModelError(
                f"something refers to {name} weakly (weakref), and it is to move to or from another stage. Drop the reference "
                "first"
            )


def renew_parameters(module: nn.Module) -> None:
    """Give a network that was traced new parameters of the same values: traces refer weakly to those that they have seen."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for each in module.modules():
        for name, old in each._parameters.items():
            if old is not None and id(old) not in made:
                new = nn.Parameter(old.detach(), requires_grad=old.requires_grad)
                copy_hooks(old, new)
                made[id(old)] = old, new
            if old is not None:
                each._parameters[name] = made[id(old)][1]


def _take_plain_forwards(model: TiledModel) -> None:
    """Undo what runs in place of the modules' own forward passes."""
    for module, plain in model._plain_forwards.items():
        if plain is None:
            vars(module).pop("forward", None)
        else:
            vars(module)["forward"] = plain
