"""A tiled model among other ranks than before: what each holds from those who have it, and the rest for newcomers.

Who is there, how the work is laid out, and who keeps a mirror of whom is data (`tatami.membership`). Nothing that is held is
changed before all ranks have all that they need, so that a death on the way leaves every survivor as it was: `relay` collects,
and what it returns puts in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tatami.cluster import Cluster
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.membership import Regroup
from tatami.model.model import TiledModel
from tatami.same_steps import optimizers_of
from tatami.state.mirroring import MirrorTensors
from tatami.state.restaging import Relocation
from tatami.state.transfer import NetworkTensors

_TAG = 15


def relay(
    model: TiledModel, change: Regroup, *, name: str, cluster: Cluster, optimizer: torch.optim.Optimizer, mirror: MirrorTensors
) -> Callable[[], None]:
    """Collect what this rank holds after `change`. Collective among its members; between two steps.

    Args:
        model: whose communicator has the members of the change as its ranks already.
        change: who is there, how the work is laid out, and who keeps what for whom.
        name: of this rank.
        cluster: the members' processors, in the order of the ranks.
        optimizer: whose state goes along.
        mirror: what this rank keeps for another.

    Returns:
        What puts all in place; it sends nothing.

    Raises:
        InputError: another optimizer steps the weights, too.
    """
    others = [type(each).__name__ for each in optimizers_of(model.parameters()) if each is not optimizer]
    if others:
        raise InputError(
            f"{', '.join(others)} steps the weights beside the Trainer's optimizer, and its state does not follow ranks that "
            "come and go. Use one optimizer in an elastic run"
        )
    optimizer.zero_grad(set_to_none=True)
    model._regroup(cluster=cluster)
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
    return lambda: relocation.arrive(fetched)


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
        "generator": model.generator.get_state(),
        "draws": None if model.draws is None else model.draws.state_dict(),
        "training": model.training,
    }


def load_common_state(model: TiledModel, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """On a newcomer."""
    for group, told in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update(told)
    model.generator.set_state(state["generator"])
    if model.draws is not None:
        model.draws.load_state_dict(state["draws"])
    model.train(state["training"])
