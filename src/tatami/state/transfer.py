"""Weights, and all that belongs to them, on their way from rank to rank: the one transfer of re-tilings, deaths and joins.

Every rank tells the others of which units of which tensors it has the values now, and of which it is to have them. From that,
all know who takes what from whom (`tatami.retiling.takes`). Gradients, and what optimizers keep for every element, go along.
Parameters keep their identity, so that optimizers, and lists of parameters that the user keeps, go on as if nothing had
happened: one that is on another pipeline stage is a stand-in, and becomes a tensor when it comes here.

Nothing that is held is changed before all ranks have all that they need: `fetch` collects, `put_in_place` sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Never, cast

import torch
from torch import nn

from tatami.errors import ModelError, PlanError
from tatami.model.model import TiledModel
from tatami.partition.blocks import Blocks
from tatami.retiling.takes import UnitTake, unit_takes
from tatami.runtime.placement import Placement
from tatami.runtime.row_messages import Moved, carry, counted_from, elementwise, put, room_for, units_of
from tatami.runtime.rows import Rows, UnitRuns
from tatami.same_steps import optimizers_of
from tatami.stages.stand_in import StandIn
from tatami.state.mirroring import MirrorTensors
from tatami.tiling import Span

_TAG = 19
_Key = tuple[int, str]
"""What there is for a tensor: an optimizer's number, and the key of its state; or one of the following."""
_VALUE, _COMPANION, _GRADIENT = (-3, "value"), (-2, "companion"), (-1, "gradient")
_Parts = dict[_Key, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What a rank tells the others.

    Attributes:
        held, needed: the units of each tensor that it has now, and is to have; one that has no units is one unit.
        mirrored: the units that it keeps for another rank.
        kinds: for each tensor of which it has some, the dtype of all that moves with its units.
        settings: for each of them, the rest of the optimizers' states, such as their numbers of steps.
    """

    held: dict[str, Span]
    needed: dict[str, Span]
    mirrored: dict[str, Span]
    kinds: dict[str, dict[_Key, torch.dtype]]
    settings: dict[str, dict[_Key, Any]]


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """What has come, and is not in place yet.

    Attributes:
        moved: between ranks.
        everyone: what all ranks told.
        own: of the network's tensors that change, what they are to be.
        mirror: the same of the mirror.
        mirrored: the units of each tensor that the mirror is to have.
        given: the names of this rank's tensors that another one is to keep.
    """

    moved: Moved
    everyone: list[Holding]
    own: dict[str, _Parts]
    mirror: dict[str, _Parts]
    mirrored: dict[str, Span]
    given: tuple[str, ...]


class NetworkTensors:
    """The tensors of a model, wherever they are, and what goes with them.

    Args:
        model: as it lies now.
        optimizer: whose state goes along, as do those of all others that have stepped parameters of the model.
        companions: more tensors, each shaped like a parameter or buffer, that go where its rows go.
        mirror: what this rank keeps for another one.
        is_new: whether what this rank has is of no worth: it has joined a run.

    Attributes:
        tensors: parameters and buffers by their first names; stand-ins for those that are not here.
    """

    def __init__(
        self,
        model: TiledModel,
        optimizer: torch.optim.Optimizer | None,
        *,
        companions: Mapping[torch.Tensor, torch.Tensor] | None = None,
        mirror: MirrorTensors | None = None,
        is_new: bool = False,
    ) -> None:
        self._model, self._companions, self._mirror = model, companions or {}, mirror or MirrorTensors()
        self._is_new = is_new
        # The given one first, so that they have the same numbers on a rank that has joined and has made no step.
        given = [] if optimizer is None else [optimizer]
        self.optimizers = list(dict.fromkeys([*given, *optimizers_of(model.parameters())]))
        self.tensors = first_named(model.module)
        found = model.found if model.staged is None else model.staged.found
        cuts = {name: runs for block in found.blocks for name, runs in block.cuts.items()}
        sliced = _blocks_of(model.found)
        self._held = {name: units_of(model.tilings[block], model.name) for name, block in sliced.items()}
        self._wholes: dict[str, torch.Tensor] = {}
        """Without memory, in their whole shapes."""
        self._cuts: dict[str, UnitRuns] = {name: runs for name, runs in cuts.items() if name in self.tensors}
        """Where the units of a tensor lie that can be divided into units."""
        for name, tensor in self.tensors.items():
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            if name in sliced:
                whole = room_for(Rows(whole, cuts[name]), units=model.tilings[sliced[name]].units)
            self._wholes[name] = whole
        self._units = {name: Rows(whole, cuts[name]).units if name in self._cuts else 1 for name, whole in self._wholes.items()}

    @contextmanager
    def shown(self, has: Callable[[str], bool] | None) -> Iterator[None]:
        """Meanwhile the network shows tensors of whole shapes without memory: where `has` is so, and else stand-ins."""
        shown: dict[int, torch.Tensor] = {}
        for name, tensor in self.tensors.items():
            made = self._wholes[name] if has is None or has(name) else self._stand_in(name)
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

    def holding(self, found: Blocks, placement: Placement, *, has: Callable[[str], bool] | None) -> Holding:
        """What this rank has, and will have.

        Args:
            found: the blocks that are divided from then on.
            placement: where this rank lies then.
            has: whether it has a tensor then; None: it has all.
        """
        after = _blocks_of(found)
        held: dict[str, Span] = {}
        needed: dict[str, Span] = {}
        kinds: dict[str, dict[_Key, torch.dtype]] = {}
        settings: dict[str, dict[_Key, Any]] = {}
        shards = self._model.shards_optimizer

        def tell(name: str, tensor: torch.Tensor) -> None:
            parts = self._parts(tensor)
            kinds.setdefault(name, {key: each.dtype for key, each in parts.items()})
            states = {
                (number, key): value
                for number, optimizer in enumerate(self.optimizers)
                for key, value in optimizer.state.get(tensor, {}).items()
            }
            rest = {key: value for key, value in states.items() if key not in parts and not (shards and _has_elements(value))}
            settings.setdefault(name, rest)

        for name, tensor in self.tensors.items():
            every = Span(0, self._units[name])
            if not isinstance(tensor, StandIn) and not self._is_new:
                held[name] = self._held.get(name, every)
                if held[name].size:
                    tell(name, tensor)
            if has is None or has(name):
                needed[name] = every if name not in after else units_of(placement.tilings[after[name]], self._model.name)
        for name, tensor in self._mirror.tensors.items():
            tell(name, tensor)
        return Holding(held=held, needed=needed, mirrored=dict(self._mirror.units), kinds=kinds, settings=settings)

    def fetch(self, mine: Holding, *, mirrors: Sequence[tuple[int, int]] = ()) -> Fetched:
        """Collect what this rank is to have and has not. Collective.

        Args:
            mine: what it has, and is to have.
            mirrors: pairs of ranks, of which the second one is to keep a copy of what the first one is to have.

        Raises:
            PlanError: on all ranks: no rank has what another one needs.
            ModelError: on all ranks: ranks that have the same tensor keep other things for it.
        """
        comm, me = self._model.comm, self._model.comm.rank
        everyone: list[Holding] = comm.allgather_object(mine)
        size = len(everyone)
        # A rank's mirror is a holder of its own.
        held = [*(each.held for each in everyone), *(each.mirrored for each in everyone)]
        kept: list[dict[str, Span]] = [{} for _ in everyone]
        for owner, keeper in mirrors:
            own = everyone[keeper].needed
            kept[keeper] = {name: units for name, units in everyone[owner].needed.items() if own.get(name) != units}
        needed = [*(each.needed for each in everyone), *kept]
        takes, missing = unit_takes(
            held,
            needed,
            unit_sizes={name: float(self._wholes[name].numel()) / max(self._units[name], 1) for name in self.tensors},
            ranks=[*range(size), *range(size)],
            groups=comm.hosts,
        )
        if missing:
            what = missing[0]
            raise PlanError(f"no rank holds unit {what.units.start} of {what.name}, which rank {what.dest % size} is to have")
        moving = {
            name
            for before, after in zip(held, needed, strict=True)
            for name, units in after.items()
            if before.get(name) != units
        }
        kinds = _kinds(everyone, moving)
        laid = {
            place: {
                name: {key: self._room(name, units=units, dtype=dtype) for key, dtype in kinds[name].items()}
                for name, units in needed[place].items()
                if held[place].get(name) != units
            }
            for place in (me, size + me)
        }
        sent_bytes = self._exchange(takes, held, needed, laid, kinds)
        mine_at = next((keeper for owner, keeper in mirrors if owner == me), None)
        return Fetched(
            moved=Moved(num_units=self._num_moved(takes, size), sent_bytes=sent_bytes),
            everyone=everyone,
            own=laid[me],
            mirror=laid[size + me],
            mirrored=kept[me],
            given=() if mine_at is None else tuple(kept[mine_at]),
        )

    def put_in_place(self, fetched: Fetched) -> None:
        """Give the network and the mirror what was fetched, and take away what is not to be here any more. Sends nothing."""
        mine = fetched.everyone[self._model.comm.rank]
        # What the first rank that has a tensor says of it.
        everyone = fetched.everyone
        settings: dict[str, dict[_Key, Any]] = {}
        for each in everyone:
            settings = {**each.settings, **settings}
        for name, tensor in self.tensors.items():
            if name not in mine.needed and not isinstance(tensor, StandIn):
                shown = self._stand_in(name)
                if isinstance(tensor, nn.Parameter):
                    self._forget(tensor)
                    _swap(tensor, nn.Parameter(shown, requires_grad=tensor.requires_grad))
                else:
                    self._replace(tensor, shown)
            elif name in fetched.own:
                renews = not mine.held.get(name, Span(0, 0)).size
                self._give(tensor, fetched.own[name], settings.get(name, {}) if renews else {})
        self._renew_mirror(fetched, settings)

    # -- inside -----------------------------------------------------------------------------------------------------------

    def _holders(self) -> Iterator[dict[str, Any]]:
        for module in self._model.module.modules():
            yield module._parameters
            yield module._buffers

    def _stand_in(self, name: str) -> StandIn:
        return StandIn(self._wholes[name], device=self._model.device)

    def _parts(self, tensor: torch.Tensor) -> _Parts:
        """A tensor with all that has a value for each of its elements."""
        parts: _Parts = {_VALUE: tensor}
        if (companion := self._companions.get(tensor)) is not None:
            parts[_COMPANION] = companion
        if isinstance(tensor, nn.Parameter) and tensor.grad is not None:
            parts[_GRADIENT] = tensor.grad
        for number, optimizer in enumerate(self.optimizers):
            parts |= {(number, key): each for key, each in elementwise(optimizer, tensor).items()}
        return parts

    def _exchange(
        self,
        takes: Sequence[UnitTake[str]],
        held: Sequence[Mapping[str, Span]],
        needed: Sequence[Mapping[str, Span]],
        laid: Mapping[int, Mapping[str, _Parts]],
        kinds: Mapping[str, Mapping[_Key, torch.dtype]],
    ) -> int:
        """Fill `laid` from what is held, here and on others; one message for each pair of ranks. Returns the bytes sent."""
        size, me = len(held) // 2, self._model.comm.rank
        incoming: dict[int, list[torch.Tensor]] = {}
        outgoing: dict[int, list[torch.Tensor]] = {}

        def views(parts: Mapping[_Key, torch.Tensor], name: str, origin: Span, units: Span) -> list[torch.Tensor]:
            here = counted_from(origin, units)
            return [view for key in sorted(kinds[name]) for view in self._cut(name, parts[key], here)]

        for take in takes:
            name, source, dest = take.name, take.source % size, take.dest % size
            if name not in kinds:
                continue
            targets: list[torch.Tensor] = []
            sources: list[torch.Tensor] = []
            if dest == me and name in laid[take.dest]:
                targets = views(laid[take.dest][name], name, needed[take.dest][name], take.units)
            if source == me and (dest != me or targets):
                own = self.tensors[name] if take.source == me else self._mirror.tensors[name]
                sources = views(self._parts(own), name, held[take.source][name], take.units)
            if source == dest:
                for target, each in zip(targets, sources, strict=True):
                    target.copy_(each)
            else:
                incoming.setdefault(source, []).extend(targets)
                outgoing.setdefault(dest, []).extend(sources)
        return carry(self._model.comm, incoming=incoming, outgoing=outgoing, tag=_TAG)

    def _num_moved(self, takes: Sequence[UnitTake[str]], size: int) -> int:
        """Units of blocks, over all ranks, whatever number of tensors they have; a tensor without units counts as one."""
        blocks, moved = _blocks_of(self._model.found), dict[tuple[str | int, int], dict[str, int]]()
        for take in takes:
            if take.source % size != take.dest % size:
                tensors = moved.setdefault((blocks.get(take.name, take.name), take.dest), {})
                tensors[take.name] = tensors.get(take.name, 0) + take.units.size
        return sum(max(tensors.values()) for tensors in moved.values())

    def _room(self, name: str, *, units: Span, dtype: torch.dtype) -> torch.Tensor:
        whole, device = self._wholes[name], self._model.device
        if name in self._cuts:
            whole = room_for(Rows(whole, self._cuts[name]), units=units.size)
        return torch.empty(whole.shape, dtype=dtype, device=device)

    def _cut(self, name: str, tensor: torch.Tensor, units: Span) -> tuple[torch.Tensor, ...]:
        if name in self._cuts:
            return Rows(tensor.detach(), self._cuts[name]).cut(units)
        return (tensor.detach(),) if units.size else ()

    def _give(self, tensor: torch.Tensor, parts: _Parts, settings: Mapping[_Key, Any]) -> None:
        """Make of a tensor, and what goes with it, what was fetched; a stand-in becomes a tensor."""
        before = {} if isinstance(tensor, StandIn) else self._parts(tensor)
        for key in sorted(before.keys() & parts.keys(), reverse=True):  # what is known by the shape of the value goes first
            put(before[key], parts[key])
        value = parts[_VALUE]
        if isinstance(tensor, StandIn):
            if not isinstance(tensor, nn.Parameter):
                self._replace(tensor, value)
                return
            _swap(tensor, nn.Parameter(value, requires_grad=tensor.requires_grad))
        if _GRADIENT in parts and _GRADIENT not in before:
            tensor.grad = parts[_GRADIENT]
        for (number, state), each in settings.items():
            self.optimizers[number].state[tensor][state] = each.clone() if isinstance(each, torch.Tensor) else each
        for (number, state), each in parts.items():
            if number >= 0 and (number, state) not in before:
                self.optimizers[number].state[tensor][state] = each

    def _forget(self, tensor: torch.Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.state.pop(tensor, None)

    def _replace(self, buffer: torch.Tensor, by: torch.Tensor) -> None:
        for held in self._holders():
            for name, tensor in held.items():
                if tensor is buffer:
                    held[name] = by

    def _renew_mirror(self, fetched: Fetched, settings: Mapping[str, Mapping[_Key, Any]]) -> None:
        """Have the mirror hold what it is to hold; the optimizers update it with the tensors that it has copies of."""
        mirror = self._mirror
        for name in mirror.tensors.keys() - fetched.mirrored.keys():
            kept = mirror.tensors.pop(name)
            self._forget(kept)
            for group in self._groups():
                group["params"] = [each for each in group["params"] if each is not kept]
        for name, parts in fetched.mirror.items():
            if is_new := name not in mirror.tensors:
                mirror.tensors[name] = self._copy_of_nothing(self.tensors[name], dtype=parts[_VALUE].dtype)
            self._give(mirror.tensors[name], parts, settings.get(name, {}) if is_new else {})
        mirror.units = dict(fetched.mirrored)
        now = first_named(self._model.module)  # a buffer that has come is another tensor than the stand-in that was there
        mirror.given = {name: now[name] for name in fetched.given}

    def _copy_of_nothing(self, own: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        """A tensor to be filled, beside `own` wherever an optimizer has that."""
        room = torch.empty(0, dtype=dtype, device=self._model.device)
        if not isinstance(own, nn.Parameter):
            return room
        copy = nn.Parameter(room, requires_grad=own.requires_grad)
        for group in self._groups():
            if any(each is own for each in group["params"]):
                group["params"].append(copy)
        return copy

    def _groups(self) -> Iterator[MutableMapping[str, Any]]:
        for optimizer in self.optimizers:
            yield from optimizer.param_groups


def first_named(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a network, each by the first of its names."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def _blocks_of(found: Blocks) -> dict[str, int]:
    """The block of each tensor that is divided into units."""
    return {name: index for index, block in enumerate(found.blocks) for name in block.cuts}


def _kinds(everyone: Sequence[Holding], moving: Collection[str]) -> dict[str, dict[_Key, torch.dtype]]:
    """What goes along with the units of each tensor that moves.

    Raises:
        ModelError: on all ranks: ranks that have the same tensor keep other things for it.
    """
    found: dict[str, dict[_Key, torch.dtype]] = {}
    for rank, each in enumerate(everyone):
        for name, kinds in each.kinds.items():
            if name in moving and found.setdefault(name, kinds) != kinds:
                raise ModelError(
                    f"rank {rank} keeps {_words(kinds)} for {name}, and another rank {_words(found[name])}: re-tile between "
                    "two steps, with the same optimizers on all ranks"
                )
    return found


def _has_elements(value: object) -> bool:
    """Whether it is of elements of a weight: with a sharded optimizer, of some of them, which stay where they are."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _words(kinds: Mapping[_Key, torch.dtype]) -> str:
    return ", ".join(f"{key} ({dtype})" for (_, key), dtype in kinds.items())


def _swap(parameter: nn.Parameter, by: nn.Parameter) -> None:
    """Make of a parameter, with its identity and the hooks of its users, what `by` is.

    As `torch.utils.swap_tensors`, which refuses where anything of a forward pass still refers to one of them: of a step that
    was broken off, in which the user's program may hold the loss, nothing goes backward any more.
    """
    one, other = cast(Any, parameter), cast(Any, by)
    if parameter.requires_grad and parameter._use_count() > 1:  # type: ignore[attr-defined]
        torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(_refuse_past)
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(parameter, by)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(one, hooks, None):
            setattr(one, hooks, getattr(one, hooks))  # torch knows them by the tensor that was there


def _refuse_past(_: Any) -> Never:
    raise ModelError(
        "this backward pass leads to a weight that has moved to another pipeline stage since. Go forward and backward between "
        "two re-tilings"
    )
