"""Ranks that are threads share torch's random state: what seeds it and draws from it is done by one of them at a time."""

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_LOCK = threading.RLock()


def one_at_a_time(draw: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """A function that seeds torch's random state first, and is called by several ranks."""

    @functools.wraps(draw)
    def alone(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        with _LOCK:
            return draw(*arguments, **options)

    return alone


@one_at_a_time
def mlp(*widths: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Linear layers of these widths, with tanh between them; the same ones in every call."""
    torch.manual_seed(seed)
    layers = [each for pair in itertools.pairwise(widths) for each in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(dtype)


class Written(nn.Module):
    """Layers, buffers and settings by name, and a forward pass that is given: a function of the network and its input."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.written = (forward,)
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> Any:
        return self.written[0](self, x)
