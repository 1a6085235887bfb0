"""The repeated layers of a network, and what their forward pass keeps: activations that can be computed once more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tatami.partition.tracing.saved_activations import Keeping

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_FEWEST = 2
"""The only layer of a network keeps while it is computed once more as much as it would have kept."""
_PLAIN = (torch.Tensor, bool, int, float, complex, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, kw_only=True)
class KeptByLayer:
    """What a layer keeps of one sample.

    Attributes:
        input_bytes: of the tensors that it is called with, as far as no layer before it was called with them.
        own_bytes: of what it leaves behind.
    """

    input_bytes: float
    own_bytes: float


def repeated_layers(model: nn.Module) -> tuple[str, ...]:
    """The layers of a network by name: the outermost modules in its lists and sequences that have weights and modules inside.

    Of nested lists and sequences, such as the four parts of a ResNet, they are those of the inner ones.
    """
    found = tuple(_layers(model, ""))
    return found if len(found) >= _FEWEST else ()


def _layers(module: nn.Module, name: str) -> Iterator[str]:
    for own, child in module.named_children():
        inner = f"{name}.{own}" if name else own
        is_layer = isinstance(module, _LISTS) and any(True for _ in child.children()) and any(True for _ in child.parameters())
        nested = tuple(_layers(child, inner)) if not is_layer or isinstance(child, _LISTS) else ()
        if nested or not is_layer:
            yield from nested
        else:
            yield inner


def layer_bytes(
    spans: Mapping[str, range], *, calls: Mapping[str, tuple[tuple[Any, ...], dict[str, Any]]], keeping: Keeping
) -> dict[str, tuple[int, int]]:
    """Bytes of the inputs of each layer, and of what it leaves behind, in a pass that `keeping` has seen.

    A layer that is called with other objects than tensors, such as a cache of keys and values, cannot be called twice.

    Args:
        spans: what each layer has kept: places in `keeping.found`.
        calls: with what each was called.
        keeping: what the whole pass has kept.
    """
    kept = [each.size_bytes for each in keeping.found.values()]
    seen: set[int] = set()
    found = {}
    for name, span in sorted(spans.items(), key=lambda item: item[1].start):
        if not _is_plain(calls[name]):
            continue
        input_bytes = 0
        for leaf in pytree.tree_leaves(calls[name]):
            if isinstance(leaf, torch.Tensor) and not keeping.is_outside(leaf):
                memory = leaf.untyped_storage()
                input_bytes += 0 if memory._cdata in seen else memory.nbytes()
                seen.add(memory._cdata)
        found[name] = (input_bytes, sum(kept[span.start : span.stop]))
    return found


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    return isinstance(value, _PLAIN)
