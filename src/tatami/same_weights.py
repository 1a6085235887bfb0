"""Whether weights that several ranks hold are the same: a few elements of each, other ones in every look.

Replicas drift apart without a word where a rank initializes, prunes or adds noise by numbers of its own, or where an optimizer
steps a parameter whose gradient nothing sums. A `Watch` compares them, so drift is found some passes after it begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from tatami.errors import InputError

_NUMBERS = 8
"""Elements of a tensor in one look."""
_PRIME = 7919
"""The first element of each look, times the number of the look."""
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_HALF_TOLERANCE = 5e-2
"""Relative to the largest element that is compared: machines of different types round differently, in every step."""

Numbers = tuple[float, ...]
"""The tolerance, and elements of one tensor."""


def numbers_of(named: Iterable[tuple[str, torch.Tensor]], *, look: int) -> dict[str, Numbers]:
    """What is compared of some tensors of any shape, in look number `look`."""
    names, pieces = [], []
    for name, tensor in named:
        if not tensor.is_floating_point() or tensor.layout is not torch.strided:
            continue
        flat = tensor.detach().reshape(-1)
        stride = max(1, -(-len(flat) // _NUMBERS))
        piece = flat[look * _PRIME % stride :: stride]
        names.append((name, len(piece), _TOLERANCE.get(tensor.dtype, _HALF_TOLERANCE)))
        pieces.append(piece.to("cpu", torch.float64))
    elements = torch.cat(pieces).tolist() if pieces else []
    found: dict[str, Numbers] = {}
    at = 0
    for name, count, tolerance in names:
        found[name] = (tolerance, *elements[at : at + count])
        at += count
    return found


def refuse_other_weights(every_rank: Sequence[Mapping[str, Numbers]], *, ranks: Sequence[int] | None = None) -> None:
    """
    Args:
        every_rank: what `numbers_of` returned on each rank; the same on all ranks.
        ranks: their numbers; None: all from 0 on.

    Raises:
        InputError: two ranks hold different numbers under one name; names them.
    """
    known: dict[str, tuple[int, Numbers]] = {}
    for rank, weights in zip(ranks or range(len(every_rank)), every_rank, strict=True):
        for name, numbers in weights.items():
            first, expected = known.setdefault(name, (rank, numbers))
            if numbers != expected and _differ(expected, numbers):
                pairs = zip(expected[1:], numbers[1:], strict=False)
                one, other = next((pair for pair in pairs if pair[0] != pair[1]), (len(expected) - 1, len(numbers) - 1))
                raise InputError(
                    f"{name} is not the same on all ranks: {one:g} on rank {first}, {other:g} on rank {rank}. Since the model "
                    "was made, ranks have changed it by numbers of their own: initialization, noise or pruning after that, "
                    "norms of a rank's own part, or an optimizer that steps what no gradient sum knows. Change weights before "
                    "the model is made, or by numbers that all ranks share"
                )


def _differ(one: Numbers, other: Numbers) -> bool:
    if len(one) != len(other):
        return True
    slack = one[0] * max(map(abs, (*one[1:], *other[1:])), default=0.0)
    pairs = zip(one[1:], other[1:], strict=True)
    return any(not (a == b or abs(a - b) <= slack or (a != a and b != b)) for a, b in pairs)
