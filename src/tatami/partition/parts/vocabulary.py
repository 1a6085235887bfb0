"""The vocabulary: the rows of an embedding and of the output layer, tied or not, split over the ranks of a replica.

embedding   a rank looks up the tokens whose rows it has, zeros for the others; the sum over the replica is the embedding
output      a rank has the logits of its rows; they stay where they are, and their cross-entropy is taken without gathering
            them (`SplitLogits`)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tatami.partition.linear_pairs import is_plain_linear
from tatami.partition.parts.split_logits import split_logits
from tatami.partition.tracing.capturing import Captured
from tatami.partition.tracing.settings import has_hooks
from tatami.runtime.context import ModuleContext, StandsIn, enter, leave
from tatami.workload.gpt import FEWEST_ROWS


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Layers that share the rows of a vocabulary.

    Attributes:
        embedding: the name of the layer that looks up rows.
        head: the name of the output layer; None where there is none that could be split with it.
        tensors: the names of all of their tensors.
    """

    rows: int
    embedding: str
    head: str | None
    tensors: tuple[str, ...]


class EmbeddingPart(StandsIn):
    """The forward pass of an `nn.Embedding` of which some rows are here."""

    def __init__(self, layer: nn.Embedding, context: ModuleContext) -> None:
        self._layer = layer
        self._context = context

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """(...) tokens to (..., width)."""
        layer, span = self._layer, self._context.units[0]()
        if self._context.rank.replica.comm is None and span.size == layer.num_embeddings:
            return F.embedding(input, layer.weight, layer.padding_idx)
        if not bool(((input >= 0) & (input < layer.num_embeddings)).all()):
            raise IndexError("index out of range in self")  # as torch says it
        here = (input >= span.start) & (input < span.stop)
        if layer.padding_idx is not None:  # its row is looked up like any other, but has no gradient
            padding = input == layer.padding_idx
        table = layer.weight if span.size else torch.cat((layer.weight, layer.weight.new_zeros(1, layer.embedding_dim)))
        found = F.embedding(torch.where(here, input - span.start, 0), table)
        found = torch.where(here.unsqueeze(-1), found, 0.0)  # of all other tokens
        if layer.padding_idx is not None:
            found = torch.where(padding.unsqueeze(-1), found.detach(), found)
        return leave(self._context, found.clone())


class HeadPart(StandsIn):
    """The forward pass of the output layer of which some rows are here."""

    def __init__(self, layer: nn.Linear, context: ModuleContext) -> None:
        self._layer = layer
        self._context = context

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """(..., width) to (..., rows), of which this rank has a part."""
        part = F.linear(enter(self._context, input), self._layer.weight, self._layer.bias)
        return split_logits(part, self._layer.out_features, self._context)


def find_vocabulary(model: nn.Module, captured: Captured) -> Vocabulary | None:
    """The largest vocabulary that can be split: its weights are read by its layers alone."""
    embeddings = [
        (name, layer)
        for name, layer in model.named_modules()
        if type(layer) is nn.Embedding and layer.num_embeddings >= FEWEST_ROWS and _is_plain_embedding(layer)
    ]
    for name, layer in sorted(embeddings, key=lambda found: -found[1].num_embeddings):
        heads = [
            other
            for other, linear in model.named_modules()
            if isinstance(linear, nn.Linear)
            and is_plain_linear(linear)
            and linear.out_features == layer.num_embeddings
            and other in captured.logits
        ]
        head = heads[0] if len(heads) == 1 else None
        layers = [layer, *([model.get_submodule(head)] if head is not None else [])]
        own = {id(parameter) for each in layers for parameter in each.parameters(recurse=False)}
        names = {name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in own}
        readers = {reader for each in names for reader in captured.readers.get(each, ())}
        if readers <= {name, head}:
            return Vocabulary(rows=layer.num_embeddings, embedding=name, head=head, tensors=tuple(sorted(names)))
    return None


def _is_plain_embedding(layer: nn.Embedding) -> bool:
    return layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse and not has_hooks(layer)


def install(model: nn.Module, vocabulary: Vocabulary, context: ModuleContext) -> None:
    """Put the parts in place of the layers' forward passes; their weights are cut already."""
    embedding = model.get_submodule(vocabulary.embedding)
    assert isinstance(embedding, nn.Embedding)
    embedding.__dict__["forward"] = EmbeddingPart(embedding, context)
    if vocabulary.head is not None:
        head = model.get_submodule(vocabulary.head)
        assert isinstance(head, nn.Linear)
        head.__dict__["forward"] = HeadPart(head, context)
