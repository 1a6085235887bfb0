"""The one place where tensors of a device pass through host memory, for what moves bytes of the host only.

Host memory that a CUDA device copies to or from is pinned: the copy runs at the speed of the bus, and one to the device need
not be waited for. torch keeps pinned memory for reuse, and does not hand it out again while a copy is under way.
"""

from __future__ import annotations

import torch

from tatami.errors import InputError


def is_movable(tensor: torch.Tensor) -> bool:
    """Whether it has values that could be sent: a tensor of the device "meta" has none, nor has one that stands for a tensor of
    another pipeline stage, whose shape is that of its `meta`."""
    return tensor.device.type != "meta" and not hasattr(tensor, "meta")


def is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu


def host_room(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous host memory of the shape and dtype of `tensor`, a tensor of a device; not filled."""
    pinned = tensor.device.type == "cuda"
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor of a device in contiguous host memory; complete when this returns."""
    room = host_room(tensor)
    room.copy_(tensor.detach())
    return room


def from_host(room: torch.Tensor, tensor: torch.Tensor) -> None:
    """The values of `room` into `tensor`, in the order of the device's stream; the host does not wait for it."""
    tensor.detach().copy_(room, non_blocking=room.is_pinned() if tensor.device.type == "cuda" else False)


def own_device(device: torch.device | str) -> torch.device:
    """`device`, with its number; a CUDA device becomes the one that this thread works on."""
    device = torch.device(device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(f"device {device}: torch finds no CUDA device here ({torch.__version__}); choose device='cpu'")
        num_devices = torch.cuda.device_count()
        if (device.index or 0) >= num_devices:
            raise InputError(f"device {device}: this rank sees {num_devices} CUDA devices, cuda:0 to cuda:{num_devices - 1}")
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


def place_of(device: torch.device, *, host: str) -> tuple[str | None, str]:
    """The name of a card that no other has, and what people call it; (None, "") for a CPU."""
    if device.type == "cpu":
        return None, ""
    if device.type != "cuda":
        return f"{host}/{device}", str(device)
    properties = torch.cuda.get_device_properties(device)
    # By its number where this torch does not tell the card's own name: containers number the cards that they see from 0, and
    # then two ranks of one card would seem to have one each.
    return str(getattr(properties, "uuid", f"{host}/{device}")), f"{properties.name} ({device} of {host})"
