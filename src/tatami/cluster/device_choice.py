"""Which rank of a host gets which of its cards: a pure decision, that every rank takes for itself."""

from __future__ import annotations

from tatami.errors import InputError

DEVICE_VARIABLE = "TATAMI_DEVICE"
"""What `tatami run --device` asks for, told to the ranks; `tatami.tile` follows it unless it is given a device."""

DEVICE_REQUESTS = ("auto", "cpu", "cuda")


def choose_device(request: str, *, local_rank: int, num_cards: int) -> str:
    """The device of the rank that is `local_rank` of its host, which has `num_cards` CUDA devices.

    auto      a card to itself for as many ranks as there are cards; the others compute on the CPU
    cuda      a card for every rank, in turn: several share one where there are more ranks
    cpu       none
    cuda:1    that one, whatever the rank

    Raises:
        InputError: another request; or a card where there is none.
    """
    if request == "cpu" or (request == "auto" and local_rank >= num_cards):
        return "cpu"
    if request in ("auto", "cuda"):
        if num_cards == 0:
            raise InputError("device 'cuda': torch finds no CUDA device on this host; choose 'auto' or 'cpu'")
        return f"cuda:{local_rank % num_cards}"
    kind, _, index = request.partition(":")
    if kind != "cuda" or not index.isdecimal():
        raise InputError(f"there is no device {request!r}; choose {', '.join(DEVICE_REQUESTS)} or one by its number, as cuda:0")
    if int(index) >= num_cards:
        raise InputError(f"device {request!r}: torch finds {num_cards} CUDA devices on this host")
    return request
