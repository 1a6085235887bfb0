"""Which device each rank of a tiled model computes on, and what it holds."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import nn

from tatami.cluster import Cluster
from tatami.cluster.device_choice import DEVICE_REQUESTS, DEVICE_VARIABLE, choose_device
from tatami.comm.agreement import problems_of
from tatami.comm.base import AbstractCommunicator
from tatami.comm.staging import own_device, place_of
from tatami.errors import InputError


def settle_devices(
    comm: AbstractCommunicator, device: torch.device | str | None, *, model: nn.Module | None = None, random: str = "plain"
) -> torch.device:
    """The device of this rank: the one given, that of `tatami run --device`, or the one of the weights. Collective.

    Raises:
        InputError: on all ranks: a device that a rank has not, or what is not done on a device.
    """
    problem, found = "", torch.device("cpu")
    try:
        asked = device or os.environ.get(DEVICE_VARIABLE) or _device_of(model)
        if isinstance(asked, str) and asked.partition(":")[0] in DEVICE_REQUESTS:
            asked = choose_device(asked, local_rank=comm.local_rank, num_cards=torch.cuda.device_count())
        found = own_device(asked)
    except (InputError, RuntimeError) as error:
        problem = str(error)
    if found.type != "cpu" and random == "local":
        problem = "random='local' seeds the random numbers of the CPU and not those of a device: its ranks would not draw alike"
    if found.type != "cpu" and comm.changes:
        problem = f"an elastic run computes on CPUs, not on {found}; start the script with `tatami run` without --elastic"
    for rank, what in problems_of(comm, problem or None).items():
        raise InputError(f"the device of rank {rank} of {comm.size}: {what}")
    return found


def _device_of(model: nn.Module | None) -> torch.device:
    named = () if model is None else (*model.named_parameters(), *model.named_buffers())
    hollow = next((name for name, tensor in named if tensor.device.type == "meta"), None)
    if hollow is not None:
        raise InputError(
            f"the weights lie on 'meta', where a tensor has a shape and no values: {hollow}. Give values to all of them, as "
            "load_state_dict(..., assign=True) does; buffers that no file holds must be made outside of torch.device('meta')"
        )
    devices = set() if model is None else {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise InputError(f"the weights lie on {names}; a rank computes on one device: give device=, or move the network to one")
    return devices.pop() if devices else torch.device("cpu")


def with_memory(cluster: Cluster, comm: AbstractCommunicator, device: torch.device) -> Cluster:
    """`cluster` with what is free on the ranks' cards as their processors' memory; ranks of one card share it. Collective.

    A CPU has no limit here, as before: what the host can spare is for its owner to say (`Processor.memory`).
    """
    card, _ = place_of(device, host=comm.hosts[comm.rank])
    free_bytes = None
    if device.type == "cuda":
        # What this process has taken so far counts as free: it is the network that is to be cut.
        free_bytes = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    told: list[tuple[str | None, int | None]] = comm.allgather_object((card, free_bytes))
    cards = [each for each, _ in told]
    processors = (
        each if bytes_ is None else replace(each, memory_bytes=max(1, bytes_ // cards.count(card_)))
        for each, (card_, bytes_) in zip(cluster.processors, told, strict=True)
    )
    return replace(cluster, processors=tuple(processors))
