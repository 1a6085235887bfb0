"""The tiled part of a network: its blocks, the tensors that they cut, and the workload that they make."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tatami.partition.exactness import BATCH_NORMS, RandomDraws, refuse_compiled, refuse_inexact
from tatami.partition.linear_pairs import PairNames, find_pairs, pair_block, pair_cuts
from tatami.partition.parts.declared import declared_parts
from tatami.partition.parts.experts import expert_lists
from tatami.partition.parts.finding import FoundPart, PartVocabulary, find_parts
from tatami.partition.tracing.capturing import USUAL_BATCH, Captured, capture
from tatami.partition.tracing.restore_state import WeightSums
from tatami.partition.tracing.sample import Sample
from tatami.partition.tracing.settings import has_hooks
from tatami.partition.tracing.tracing import Followed, cut_names, follow_modules
from tatami.runtime.precision import without_autocast
from tatami.runtime.rows import TiledBlock
from tatami.stages.stand_in import StandIn
from tatami.workload import ELEMENT_FLOP, Block, Recomputation, RecomputedLayer, Workload
from tatami.workload.workload import OWN_COPIES

_GOOD_COPIES = 1
"""The Trainer's copy of the last good weight; with the optimizer's moments a rank may keep it of its shard alone."""
_ADAM_MOMENTS = 2
_UPDATE_COPIES = 2
"""Temporary tensors of Adam as large as the weight that it is updating: the root of its second moment, and the quotient."""
_STATISTICS_BYTES = 128
"""Bytes of one channel: means and variances of up to eight replicas, and what is computed from them."""
FOLLOWING = threading.Lock()
"""torch.fx and torch.export patch torch for the whole process while they follow a module: one at a time."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """All blocks of a network. No tensor is in two.

    Attributes:
        blocks: first those of `pairs`, then those of `followed`, then those of `parts`.
        pairs: pairs of linear layers, found without a sample batch.
        followed: modules that run a program of their own, by name.
        parts: modules that run as they are with some of their units.
        reasons: of modules that could not be followed, by name: why.
        stops: why weights are whole that are, where that is known, by their names.
        captured: what was seen on the sample batch, without its tensors; None where there was none.
    """

    blocks: tuple[TiledBlock, ...]
    pairs: tuple[PairNames, ...] = ()
    followed: Mapping[str, Followed] = field(default_factory=dict)
    parts: tuple[FoundPart, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    stops: Mapping[str, str] = field(default_factory=dict)
    captured: Captured | None = None

    def runs_plainly(self, model: nn.Module, name: str) -> bool:
        """Whether a followed module that has all its units here may run as the user wrote it.

        It may not where it calls functions that look at the whole batch; layers that do so are replaced.
        """
        assert self.captured is not None
        for inner, module in model.get_submodule(name).named_modules(prefix=name):
            if inner in self.captured.draws and type(module) is not nn.Dropout:
                return False
            if inner in self.captured.normalizes and type(module) not in BATCH_NORMS:
                return False
        return True

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers that can be computed once more: not those inside of a module that runs a program of its own.

        All where activations are recomputed, or none; none where the network was not seen on a sample.
        """
        closed = {*self.followed, *(name for part in self.parts for name in part.closed)}
        known = () if self.captured is None else self.captured.layers
        found = tuple(name for name in known if not _lies_in(name, closed - {name}))
        return found if len(found) > 1 else ()

    def of_followed(self, name: str) -> range:
        """Which of `blocks` are those of a followed module, in its own order."""
        start = len(self.pairs)
        for other, each in self.followed.items():
            if other == name:
                return range(start, start + len(each.blocks))
            start += len(each.blocks)
        raise KeyError(name)

    def of_part(self, number: int) -> range:
        """Which of `blocks` are those of `parts[number]`."""
        start = len(self.pairs) + sum(len(each.blocks) for each in self.followed.values())
        start += sum(len(each.blocks) for each in self.parts[:number])
        return range(start, start + len(self.parts[number].blocks))

    @property
    def groups(self) -> Iterator[tuple[PairNames | str | FoundPart, tuple[str, ...], range]]:
        """What is split together: itself, the modules that run with some of their units, and which of `blocks`."""
        for index, pair in enumerate(self.pairs):
            yield pair, (pair.first, pair.second, *pair.dropouts, *pair.others), range(index, index + 1)
        for name in self.followed:
            yield name, (name,), self.of_followed(name)
        for number, part in enumerate(self.parts):
            yield part, part.closed, self.of_part(number)

    def within(self, holds: Callable[[Iterable[str], Iterable[str]], bool]) -> Blocks:
        """The blocks of which `holds` accepts the modules and the tensors that are cut."""
        kept = [
            (group, own)
            for group, modules, own in self.groups
            if holds(modules, {cut for index in own for cut in self.blocks[index].cuts})
        ]
        groups = [group for group, _ in kept]
        return replace(
            self,
            blocks=tuple(self.blocks[index] for _, own in kept for index in own),
            pairs=tuple(group for group in groups if isinstance(group, PairNames)),
            followed={group: self.followed[group] for group in groups if isinstance(group, str)},
            parts=tuple(group for group in groups if not isinstance(group, PairNames | str)),
        )


def find_blocks(
    model: nn.Module, *, sample: Any = None, random: RandomDraws = "plain", batch_size: int | None = None
) -> Blocks:
    """Finds what of `model` can be tiled; the model is not changed.

    Without a sample batch these are pairs of linear layers with element-wise operations between them. With one, every module
    is followed over it: attention, gated and convolution pairs, whatever is a sum over units. What was found is tested on the
    sample.

    Args:
        model: any network.
        sample: inputs of the network: a tensor (samples, ...), a tuple of arguments, or a mapping of named ones.
        random: as in `tatami.tile`: with "local", random layers that cannot draw as the plain model does are no error.
        batch_size: the global batch, as far as it is known.

    Raises:
        ModelError: a layer that a tiled run could not compute exactly (named).
        InputError: a sample batch without tensors, or of fewer than two samples.
    """
    with FOLLOWING, _old_objects_uncollected(), without_autocast():
        return _find_blocks(model, sample, random, batch_size)


@contextmanager
def _old_objects_uncollected() -> Iterator[None]:
    """Python's garbage collection looks at new objects only: tracing makes so many that it would go through all modules and all
    of torch again and again (0.6 of 8.4 s for a Llama of 30 layers)."""
    if gc.get_freeze_count():  # the program has done this itself, and unfreeze() would undo it
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _find_blocks(model: nn.Module, sample: Any, random: RandomDraws, batch_size: int | None) -> Blocks:
    refuse_compiled(model)
    weights = WeightSums(model)
    pairs = find_pairs(model)
    followed: dict[str, Followed] = {}
    reasons: dict[str, str] = {}
    stops: dict[str, str] = {}
    captured = None
    parts: tuple[FoundPart, ...] = ()
    unsplit: dict[str, str] = {}
    if sample is not None:
        captured = capture(model, Sample.of(sample), batch_size=batch_size or USUAL_BATCH)
        pairs = tuple(pair for pair in pairs if not any(map(captured.read_elsewhere, (pair.first, pair.second))))
        parts, unsplit = find_parts(model, captured)
        found = _beside(model, captured, parts, pairs)
        vocabularies = tuple(part for part in parts if isinstance(part, PartVocabulary))
        # A module that looks up tokens itself is not followed where its vocabulary is split, nor one around a pair beyond it: a
        # low-rank addition is a pair of few units in a layer with many. Where that is worth less, the rest is followed.
        for given_up, fewer_parts, fewer_pairs in (
            ({name for part in vocabularies for block in part.blocks for name in block.cuts}, vocabularies, ()),
            ({name for pair in pairs for name in pair_cuts(model, pair)}, (), pairs),
        ):
            if _may_be_better(model, parts, found, given_up=given_up):
                rest = tuple(part for part in parts if part not in fewer_parts)
                other = _beside(model, captured, rest, tuple(pair for pair in pairs if pair not in fewer_pairs))
                if _split_elements(model, rest, other) > _split_elements(model, parts, found):
                    parts, found = rest, other
        pairs, followed, reasons, stops = found
    refuse_inexact(model, followed=followed, captured=captured, written=weights.changed(), random=random)
    blocks = [TiledBlock(facts=_pair_facts(model, pair, captured), cuts=pair_cuts(model, pair)) for pair in pairs]
    for name, each in followed.items():
        prefix = f"{name}." if name else ""
        for block in each.blocks:
            cuts_of_block = {prefix + tensor: runs for tensor, runs in block.cuts.items()}
            blocks.append(TiledBlock(facts=replace(block.facts, name=name), cuts=cuts_of_block))
    blocks += [block for part in parts for block in part.blocks]
    for name, why in unsplit.items():
        if not _all_split(model.get_submodule(name), name, blocks):
            reasons[name] = why
    if captured is not None:  # its inputs lead, through the graph of their pass, to all weights, whole, and would hold them
        calls = {name: replace(call, args=(), kwargs={}) for name, call in captured.calls.items()}
        captured = replace(captured, calls=calls, kept=())
    return Blocks(
        blocks=tuple(blocks), pairs=pairs, followed=followed, parts=parts, reasons=reasons, stops=stops, captured=captured
    )


def without_blocks(model: nn.Module, found: Blocks, *, random: RandomDraws) -> Blocks:
    """What was found of `model`, with nothing that is split.

    Raises:
        ModelError: a layer that could not be computed exactly so.
    """
    refuse_inexact(model, followed={}, captured=found.captured, written=(), random=random)
    return Blocks(blocks=(), reasons=found.reasons, stops=found.stops, captured=found.captured)


def _all_split(module: nn.Module, name: str, blocks: Sequence[TiledBlock]) -> bool:
    """Whether what looks like a list of experts is one of layers, as that of `nn.TransformerEncoder`, each split by itself."""
    if declared_parts(module) is not None:
        return False
    prefix = f"{name}." if name else ""
    layers = [
        f"{prefix}{listed}.{own}."
        for listed in expert_lists(module)
        for own, _ in module.get_submodule(listed).named_children()
    ]
    cuts = [cut for block in blocks for cut in block.cuts]
    return bool(layers) and all(any(cut.startswith(layer) for cut in cuts) for layer in layers)


_Found = tuple[tuple[PairNames, ...], dict[str, Followed], dict[str, str], dict[str, str]]


def _beside(model: nn.Module, captured: Captured, parts: Sequence[FoundPart], pairs: Sequence[PairNames]) -> _Found:
    """The pairs and the followed modules beside `parts`, and the rest of what `follow_modules` says."""
    closed = {name for part in parts for name in part.closed}
    left = tuple(pair for pair in pairs if not _lies_in(pair.first, closed) and not _lies_in(pair.second, closed))
    while True:
        taken = {name for pair in left for name in pair_cuts(model, pair)} | _shared(model) | _hooked(model)
        followed, reasons, stops = follow_modules(model, captured, taken=taken, closed=closed)
        # A module that runs a program of its own has no place for the layers of a pair: the program splits it, or nothing does.
        outside = tuple(pair for pair in left if "" not in followed and not _lies_in(pair.first, set(followed)))
        if outside == left or not followed:
            return left, followed, reasons, stops
        left = outside


def _split_names(model: nn.Module, parts: Sequence[FoundPart], found: _Found) -> set[str]:
    """The tensors that are split."""
    pairs, followed, *_ = found
    names = {name for part in parts for block in part.blocks for name in block.cuts}
    names |= {name for pair in pairs for name in pair_cuts(model, pair)}
    return names | {cut for name, each in followed.items() for cut in cut_names(name, each)}


def _split_elements(model: nn.Module, parts: Sequence[FoundPart], found: _Found) -> int:
    names = _split_names(model, parts, found)
    return sum(parameter.numel() for name, parameter in model.named_parameters() if name in names)


def _may_be_better(model: nn.Module, parts: Sequence[FoundPart], found: _Found, *, given_up: set[str]) -> bool:
    """Whether more weights are left whole than those that would be given up have."""
    if not given_up:
        return False
    names = _split_names(model, parts, found)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.dim() > 1}
    whole = sum(size for name, size in sizes.items() if name not in names)
    return whole > sum(size for name, size in sizes.items() if name in given_up)


def _lies_in(name: str, modules: set[str]) -> bool:
    return any(name == other or name.startswith(f"{other}.") or not other for other in modules)


def _pair_facts(model: nn.Module, pair: PairNames, captured: Captured | None) -> Block:
    """The facts of a pair: as it was seen on the sample batch, or by Table 1 of the paper where there was none."""
    rows = _rows(model, pair, captured)
    facts = pair_block(model, pair, rows=rows)
    kept = None if captured is None else captured.kept_between(pair.first, pair.second, units=facts.units)
    if kept is None:
        return facts
    # Counted as other blocks are: products, and an activation, and for each what its gradients take.
    first, second = (model.get_submodule(name).get_parameter("weight") for name in (pair.first, pair.second))
    inputs, outputs = first.shape[1], second.shape[0]
    forward_flop = 2 * (inputs + outputs) + ELEMENT_FLOP
    below = bool(facts.backward_elements)
    hidden = below or first.requires_grad
    flop = forward_flop + 2 * inputs * (first.requires_grad + below) + 2 * hidden * ELEMENT_FLOP
    flop += 2 * outputs * (second.requires_grad + hidden)
    return replace(
        facts,
        flop_per_unit=rows * flop,
        flop_per_sample=0.0,
        forward_fraction=forward_flop / flop,
        unit_activation_bytes=kept / facts.units,
        sample_activation_bytes=0.0,
    )


def _rows(model: nn.Module, pair: PairNames, captured: Captured | None) -> float:
    """How many go through a pair for each sample, as the sample batch showed; 1 where that is not known."""
    first = model.get_submodule(pair.first)
    call = None if captured is None else captured.calls.get(pair.first)
    if call is None or not isinstance(first, nn.Linear):
        return 1.0
    elements = sum(
        leaf.numel() for leaf in pytree.tree_leaves((call.args, dict(call.kwargs))) if isinstance(leaf, torch.Tensor)
    )
    return elements / first.in_features / call.samples


def _hooked(model: nn.Module) -> set[str]:
    """Tensors of modules that have hooks, or whose parameters have: they are called with what is whole."""
    return {
        f"{name}.{own}" if name else own
        for name, module in model.named_modules()
        if has_hooks(module, forward=False)
        for own in (*module._parameters, *module._buffers)
    }


def _shared(model: nn.Module) -> set[str]:
    """Tensors that the network has under several names: each use needs them whole."""
    names: dict[int, list[str]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        names.setdefault(id(tensor), []).append(name)
    return {name for each in names.values() if len(each) > 1 for name in each}


def workload_of(
    model: nn.Module,
    found: Blocks,
    *,
    samples: int,
    wire: str | None = None,
    local_statistics: bool = False,
    sharded_optimizer: bool = False,
    optimizer_moments: int = _ADAM_MOMENTS,
    rescue_copy: bool = True,
) -> Workload:
    """The workload of `model` with the blocks that `find_blocks` found in it.

    Args:
        samples: the global batch.
        wire: to what sums are rounded on their way; None: they travel as they are.
        local_statistics: whether batch normalization takes the statistics of each replica's samples, and sums nothing.
        sharded_optimizer: whether each rank keeps the optimizer's state, and the copy, of its shard of the weights alone.
        optimizer_moments: tensors as large as a weight that the optimizer keeps for it.
        rescue_copy: whether the Trainer keeps a copy of the last good weights.
    """
    good_copies = _GOOD_COPIES if rescue_copy else 0
    optimizer_copies = good_copies + optimizer_moments
    tiled = {name for block in found.blocks for name in block.cuts}
    own = [(name, tensor) for name, tensor in model.named_parameters() if not isinstance(tensor, StandIn)]
    trained = {name: parameter for name, parameter in own if parameter.requires_grad}
    replicated = [parameter for name, parameter in trained.items() if name not in tiled]
    frozen = {
        name: tensor.numel() * tensor.element_size() * copies_untrained(tensor)
        for name, tensor in (*own, *model.named_buffers())
        if name not in trained and not isinstance(tensor, StandIn)
    }
    blocks = _facts(found, trained, frozen)
    # Half precision is summed, and therefore travels, in float32 unless a wire is named.
    element_bytes = max((4, *(parameter.element_size() for parameter in trained.values())))
    kept_bytes = 0.0 if found.captured is None else found.captured.kept_bytes
    behind = None if found.captured is None else found.captured.leaves_behind
    return Workload(
        samples=samples,
        blocks=blocks,
        trained_tensors=len(trained),
        replicated_parameters=sum(parameter.numel() for parameter in replicated),
        replicated_flop_per_sample=_replicated_flop(found, replicated),
        wire=wire,
        element_bytes=element_bytes,
        state_bytes_per_parameter=(OWN_COPIES + optimizer_copies) * element_bytes,
        sharded_bytes_per_parameter=optimizer_copies * element_bytes if sharded_optimizer else 0.0,
        rescue_bytes_per_parameter=good_copies * element_bytes,
        update_bytes_per_parameter=_UPDATE_COPIES * element_bytes if optimizer_moments >= _ADAM_MOMENTS else 0.0,
        largest_parameters=max((parameter.numel() for parameter in replicated), default=0),
        backward_moments=((1.0, 1.0),) if found.captured is None else tuple(found.captured.backward_moments),
        recomputation=_recomputation(found, blocks),
        # Whatever the pass kept, and no unit owns.
        replicated_activation_bytes=max(0.0, kept_bytes - sum(each.units * each.unit_activation_bytes for each in blocks)),
        replicated_frozen_bytes=sum(size for name, size in frozen.items() if name not in tiled) + 2 * _statistics_bytes(model),
        batch_statistics=() if local_statistics else _batch_statistics(model, found.captured),
        micro_batches=1 if behind is not None and behind.buffers | behind.counting else None,
    )


def _recomputation(found: Blocks, blocks: Sequence[Block]) -> Recomputation | None:
    """What stays where the layers are computed once more; None where there are no layers for that."""
    captured, names = found.captured, found.layers
    if captured is None or not names:
        return None
    kept = {name: captured.layers[name] for name in names}
    inside = {name: tuple(index for index, each in enumerate(blocks) if _lies_in(each.name, {name})) for name in names}
    placed = {index for own in inside.values() for index in own}
    units_bytes = [each.units * each.unit_activation_bytes for each in blocks]
    outside_bytes = captured.kept_bytes - sum(each.own_bytes for each in kept.values())
    outside_bytes -= sum(size for index, size in enumerate(units_bytes) if index not in placed)
    return Recomputation(
        kept_bytes=max(0.0, outside_bytes) + sum(each.input_bytes for each in kept.values()),
        layers=tuple(
            RecomputedLayer(beside_bytes=max(0.0, kept[name].own_bytes - sum(units_bytes[index] for index in own)), blocks=own)
            for name, own in inside.items()
        ),
        flop_fraction=sum(captured.flop.get(name, 0.0) for name in names) / max(1.0, 3 * captured.pass_flop),
    )


def _batch_statistics(model: nn.Module, captured: Captured | None) -> tuple[int, ...]:
    """Numbers that every batch normalization over the global batch sums: sums and squares of each channel, and the count.

    A layer that is frozen in evaluation mode, while the network around it is not, takes no statistics.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, BATCH_NORMS)}
    frozen = {
        name for name, layer in layers.items() if model.training and not layer.training and layer.running_mean is not None
    }
    if captured is not None:
        called = [(name, channels) for name, channels in captured.normalized if name not in frozen]
    else:
        called = [(name, layer.num_features) for name, layer in layers.items() if name not in frozen]
    return tuple(2 * channels + 1 for _, channels in called)


def copies_untrained(tensor: torch.Tensor) -> int:
    """How often a rank keeps what is not trained: of buffers the Trainer has a copy, a frozen weight does not change."""
    return 1 if isinstance(tensor, nn.Parameter) else 2


def _statistics_bytes(model: nn.Module) -> int:
    """What batch normalization keeps of each channel of some replicas, whatever the samples are."""
    layers = (layer for layer in model.modules() if isinstance(layer, BATCH_NORMS))
    return sum(_STATISTICS_BYTES * layer.num_features for layer in layers)


def _facts(found: Blocks, trained: Mapping[str, nn.Parameter], frozen: Mapping[str, int]) -> tuple[Block, ...]:
    """What planners know of each block. What is frozen has no gradient to send."""
    facts: list[Block] = []
    elements: list[int] = []
    sizes_bytes: list[int] = []
    largest: list[int] = []
    for block in found.blocks:
        if block.begins:
            facts.append(block.facts)
            elements.append(0)
            sizes_bytes.append(0)
            largest.append(0)
        own = [trained[name].numel() for name in block.cuts if name in trained]
        elements[-1] += sum(own)
        largest[-1] = max(largest[-1], *own, 0)
        sizes_bytes[-1] += sum(frozen.get(name, 0) for name in block.cuts)
    return tuple(
        replace(
            each, unit_parameters=owned // each.units, unit_frozen_bytes=size_bytes / each.units, unit_largest=most / each.units
        )
        for each, owned, size_bytes, most in zip(facts, elements, sizes_bytes, largest, strict=True)
    )


def _replicated_flop(found: Blocks, replicated: Sequence[nn.Parameter]) -> int:
    """Flop for each sample of what every rank of a replica repeats."""
    captured = found.captured
    if captured is None:
        # 2 flop per weight forward, 4 backward: exact for linear layers, too few where weights are used more than once.
        return sum(6 * parameter.numel() for parameter in replicated if parameter.dim() > 1)
    split = sum(block.facts.flop(units=block.facts.units, samples=1.0) for block in found.blocks if block.begins)
    return round(max(0.0, 3 * captured.pass_flop - split))
