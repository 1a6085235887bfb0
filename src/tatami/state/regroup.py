"""A tiled model among other ranks than before: what each holds from those who have it, and the rest for newcomers.

Who is there, how the work is laid out, and who keeps a mirror of whom is data (`tatami.membership`). Nothing that is held is
changed before all ranks have all that they need, so that a death on the way leaves every survivor as it was: `relay` collects,
and what it returns puts in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tatami.cluster import Cluster
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.membership import Regroup
from tatami.model.model import TiledModel
from tatami.runtime.weight_average import WeightAverage, averages_of
from tatami.same_steps import optimizers_of
from tatami.state.mirroring import MirrorTensors
from tatami.state.restaging import Relocation
from tatami.state.training_state import draws_state, restore_draws
from tatami.state.transfer import NetworkTensors

_TAG = 15


def relay(
    model: TiledModel, change: Regroup, *, name: str, cluster: Cluster, optimizer: torch.optim.Optimizer, mirror: MirrorTensors
) -> Callable[[], None]:
    """Collect what this rank holds after `change`. Collective among its members; between two steps.

    Args:
        model: whose communicator has the members of the change as its ranks already.
        change: who is there, how the work is laid out, and who keeps what for whom.
        cluster: the members' processors, in the order of the ranks.
        mirror: what this rank keeps for another.

    Returns:
        What puts all in place; it sends nothing.

    Raises:
        InputError: another optimizer steps the weights, too; or averages of the weights differ between ranks.
    """
    averages = averages_of(model.parameters())
    others = [type(each).__name__ for each in optimizers_of(model.parameters()) if each not in (optimizer, *averages)]
    if others:
        raise InputError(
            f"{', '.join(others)} steps the weights beside the Trainer's optimizer, and its state does not follow ranks that "
            "come and go. Use one optimizer in an elastic run"
        )
    optimizer.zero_grad(set_to_none=True)
    model._regroup(cluster=cluster)
    _align(averages, model.comm, is_new=name in change.newcomers)
    network = NetworkTensors(model, optimizer, mirror=mirror, is_new=name in change.newcomers)
    relocation = Relocation(model, change.layout, network)
    if relocation.changes_stages:
        relocation.leave()
    number_of = {member: number for number, member in enumerate(change.members)}
    pairs = [(number_of[each.owner], number_of[each.keeper]) for each in change.mirrors]
    try:
        with torch.no_grad():
            fetched = network.fetch(relocation.mine, mirrors=pairs)
    except BaseException:
        if relocation.changes_stages:
            relocation.stay()
        raise

    def put_in_place() -> None:
        relocation.arrive(fetched)
        for each in averages:
            each.swap()

    return put_in_place


def _align(averages: Sequence[WeightAverage], comm: AbstractCommunicator, *, is_new: bool) -> None:
    """Have averages that went equally many steps, and weights in the network. Collective.

    A rank that learns only now that the last update was made is yet to make the step that follows it.

    Raises:
        InputError: on all ranks: they have made different averages, or stepped them differently.
    """
    made: list[list[int | None]] = comm.allgather_object([None if is_new else each.num_steps for each in averages])
    columns = [{count for count in counts if count is not None} for counts in zip(*made, strict=False)]
    if len(set(map(len, made))) > 1 or any(max(counts) - min(counts) > 1 for counts in columns):
        raise InputError(
            f"all ranks must make the same WeightAverages and step them after the same updates; they made {made} steps"
        )
    for each, counts in zip(averages, columns, strict=True):
        if is_new:
            each.num_steps = max(counts)
        else:
            each.swap(back=True)
            each.catch_up(max(counts))


def tell_newcomers(comm: AbstractCommunicator, change: Regroup, what: Callable[[], Any]) -> Any:
    """What the source of `change` makes, on newcomers; None on all others, which do not wait for it. Collective."""
    source, mine = change.members.index(change.source), change.members[comm.rank]
    if comm.rank == source and change.newcomers:
        value = what()
        for name in change.newcomers:
            comm.send_object(value, change.members.index(name), tag=_TAG)
    return comm.recv_object(source, tag=_TAG) if mine in change.newcomers else None


def common_state(model: TiledModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What all ranks have in common beside tensors and their states: for newcomers, who then `load_common_state`."""
    return {
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
        **draws_state(model),
        "training": model.training,
        "trained": {name: each.requires_grad for name, each in model.module.named_parameters()},
    }


def load_common_state(model: TiledModel, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """On a newcomer, whose network and optimizer are as they were before training.

    Raises:
        InputError: the optimizer has other groups of parameters by now, as where a callback has added one.
    """
    if (num_here := len(optimizer.param_groups)) != (num_there := len(state["groups"])):
        raise InputError(
            f"the optimizer of a rank that joins has {num_here} parameter group{'s' * (num_here > 1)}, and those of the run "
            f"have {num_there}: make all groups before the training begins"
        )
    for group, told in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update(told)
    for name, each in model.module.named_parameters():
        each.requires_grad_(state["trained"][name])
    restore_draws(model, state)
    model.train(state["training"])
