"""`--device`: on what the ranks of a command compute."""

from __future__ import annotations

import os

from tatami.cluster.device_choice import DEVICE_REQUESTS, DEVICE_VARIABLE, choose_device
from tatami.errors import InputError

DEVICE_HELP = "Cards for the ranks of each host: auto (one each, then CPUs), cuda (in turn), cpu."


def check_device(device: str, *, hosts: str | None) -> None:
    """
    Raises:
        InputError: there is no such choice; or ranks of this machine are to have cards, of which it has none.
    """
    if device not in DEVICE_REQUESTS:
        raise InputError(f"--device {device!r}: choose one of: {', '.join(DEVICE_REQUESTS)}")
    if device == "cuda" and hosts is None:
        import torch

        choose_device(device, local_rank=0, num_cards=torch.cuda.device_count())


def ask_for_device(device: str, *, hosts: str | None) -> None:
    """Tell the ranks that are started from here, whose `tatami.tile` follows it.

    Raises:
        InputError: as `check_device`.
    """
    check_device(device, hosts=hosts)
    os.environ[DEVICE_VARIABLE] = device
