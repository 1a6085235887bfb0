"""State dicts that say which units of a network they hold, so that one rank's part is not loaded as another's.

The spans travel in the state dict as a tensor of float64: it survives safetensors, copies by `clone`, and averages.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tatami.checkpoints.state_codec import State
from tatami.errors import CheckpointError, warn

KEY = "_extra_state"
"""Where torch keeps what `get_extra_state` returns."""
_DTYPE, _NUMBERS = torch.float64, 3

Units = Sequence[tuple[int, int, int]]
"""For each block: the first unit that is here, the one after the last, and how many there are."""


class PartOfWeights(OrderedDict[str, Any]):
    """A state dict that holds only some units: pickling it, as `torch.save` does, warns. Copies stay what they are."""

    def __reduce__(self) -> Any:
        warn(
            "this state dict has only the units that its rank holds, so what is saved is a part of the weights. All of them: "
            "tatami.train.save_model(model, path) or tatami.train.whole_state_dict(model), which all ranks call; all of "
            "training: tatami.save_training"
        )
        return OrderedDict, (), vars(self), None, iter(self.items())

    def __copy__(self) -> PartOfWeights:
        return self._of(self.items(), vars(self))

    copy = __copy__

    def __deepcopy__(self, memo: dict[int, Any]) -> PartOfWeights:
        pairs = [(key, copy.deepcopy(value, memo)) for key, value in self.items()]
        return self._of(pairs, copy.deepcopy(vars(self), memo))

    def _of(self, pairs: Any, attributes: Mapping[str, Any]) -> PartOfWeights:
        made = type(self)(pairs)
        vars(made).update(attributes)
        return made


def units_tensor(units: Units) -> torch.Tensor:
    """(blocks, 3), as the state dict carries it."""
    return torch.tensor(units, dtype=_DTYPE).reshape(-1, _NUMBERS)


def check_units(given: Any, own: Units) -> None:
    """Whether a state dict holds the units that this rank holds.

    Args:
        given: what the state dict carries.
        own: units of this rank.

    Raises:
        CheckpointError: it holds others; says which.
    """
    if not isinstance(given, torch.Tensor) or given.dim() != 2 or given.shape[1] != _NUMBERS or given.shape[0] != len(own):
        raise CheckpointError(f"this state dict is of a network with other blocks than this one, which has {len(own)}")
    for number, (here, there) in enumerate(zip(own, given.round().to(torch.int64).tolist(), strict=True)):
        if list(here) != there:
            raise CheckpointError(
                f"this state dict has {_told(there)} of block {number}, and this rank holds {_told(here)}: it was saved by "
                "another rank, or under another layout. tatami.load_training loads what tatami.save_training wrote on any "
                "ranks and layout; tatami.train.load_whole_state_dict takes whole weights"
            )


def check_replicas(found: Sequence[Any], *, sets: Sequence[Sequence[int]]) -> None:
    """Refuse to keep one state for ranks that hold different units.

    Args:
        found: of each rank, what `units_in` its state.
        sets: ranks that are said to hold the same state.

    Raises:
        CheckpointError: names two such ranks.
    """
    for first, *others in sets:
        for rank in others:
            if found[rank] != found[first]:
                raise CheckpointError(
                    f"ranks {first} and {rank} are said to hold the same state (replica_sets), but hold different units of a "
                    "tiled model. Leave replica_sets out, or use tatami.save_training"
                )


def units_in(state: State) -> list[Any]:
    """The units of all state dicts of tiled models in a state."""
    if isinstance(state, Mapping):
        spans = [value.tolist() for key, value in state.items() if str(key).endswith(KEY) and _is_spans(value)]
        return spans + [each for value in state.values() for each in units_in(value)]
    return [each for value in state for each in units_in(value)] if isinstance(state, list | tuple) else []


def _is_spans(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == _DTYPE and value.dim() == 2 and value.shape[1] == _NUMBERS


def _told(span: Sequence[int]) -> str:
    start, stop, total = span
    return f"units {start} to {stop - 1} of {total}" if stop > start else f"none of {total} units"
