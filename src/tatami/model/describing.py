"""A description for people: what of a network is split and how, what is repeated, and what could not be traced."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from tatami.model.describing_stages import StagesDescription
from tatami.partition.blocks import Blocks
from tatami.workload import Workload
from tatami.workload.gpt import FEWEST_ROWS

_WIDEST = 120
_INDENT = "  "
_HINTS = (
    (
        "data-dependent",
        "the forward pass looks at values there. Write it without a branch on them (torch.where), or move that line into a "
        "module of its own, so that the rest can be followed",
    ),
    (
        "is not the sum of",
        "where something else is added to what the units give, put their sum into a module of its own; where the module was "
        "registered, look at the axes and runs that were given",
    ),
    (
        "computed from others",
        "torch.nn.utils.parametrize.remove_parametrizations takes it away, where the layer is to be split",
    ),
    (
        "differs by",
        "its two parts do not give what the whole gives, so it stays whole. If they should, please report it with this line",
    ),
)
_LEAST_FLOP = 0.005
"""A smaller share of the flop is not named."""
_LEAST_REST = 0.02
_NUMBER = re.compile(r"\.\d+(?=[. ]|$)")
"""A layer's place in a name, as in "layers.3.mlp"."""
_WITH_BACKWARD = 3
"""Flop of a step for each of the forward pass, as repeated layers are counted."""
_BIASES = "biases after a sum"
_COMPUTED = "a weight that is computed from others, as by weight_norm, is not split"
_HINT = "rewrite what this names, or move it into a module of its own, so that the rest can be followed"


@dataclass(frozen=True, kw_only=True)
class SplitPart:
    """Blocks of a network that are alike.

    Attributes:
        kind: what sort of block each is.
        unit: what one unit is, singular.
        units: of each of them.
        names: where they are.
        flop_fraction: their share of the network's flop that is split over units.
    """

    kind: str
    unit: str
    units: int
    names: tuple[str, ...]
    flop_fraction: float

    @property
    def words(self) -> str:
        """For example "4 x attention of 6 heads"."""
        first, *rest = self.unit.partition(" of ")
        several = f"{first}s{''.join(rest)}"  # groups of heads
        return f"{len(self.names)} x {self.kind} of {self.units:,} {self.unit if self.units == 1 else several}"


@dataclass(frozen=True, kw_only=True)
class RepeatedPart:
    """Layers of one class that every rank of a replica computes, since their weights are in no block, for one reason.

    Attributes:
        layer: the class, or what the weights are where they are only a part of a layer.
        names: where they are.
        parameters: elements of their trained weights.
        frozen: elements of their frozen weights.
        flop_fraction: their share of the network's flop; 0 where no sample batch was given.
        reason: why they are not split; empty where the class says it, or where no sample batch was given.
    """

    layer: str
    names: tuple[str, ...]
    parameters: int
    frozen: int = 0
    flop_fraction: float = 0.0
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class UnfollowedPart:
    """Modules that could not be followed, for one reason.

    Attributes:
        layer: the class.
        names: where they are; "" is the network itself.
        reason: the line and the operation, where they are known, and what torch said.
        hint: what to do.
    """

    layer: str
    names: tuple[str, ...]
    reason: str
    hint: str


@dataclass(frozen=True, kw_only=True)
class Description:
    """What `TiledModel.describe` returns; print it.

    Attributes:
        network: the class of the model.
        split: what is tiled.
        repeated: what is not.
        unfollowed: what could not be looked into.
        parameters: elements of all trained weights.
        frozen: elements of all frozen weights.
        repeated_fraction: of the network's flop, the share that every rank of a replica computes for all samples of the
            replica.
        sampled: whether a sample batch was given, without which only pairs of linear layers are found.
        stages: of a network that is divided into pipeline stages; None: it is not.
    """

    network: str
    split: tuple[SplitPart, ...]
    repeated: tuple[RepeatedPart, ...]
    unfollowed: tuple[UnfollowedPart, ...]
    parameters: int
    frozen: int
    repeated_fraction: float
    sampled: bool
    stages: StagesDescription | None = None

    @property
    def summary(self) -> str:
        """One line."""
        if self.split:
            told = [
                f"split over units: {', '.join(part.words for part in self.split)}",
                f"repeated on every rank of a replica: {percent(self.repeated_fraction)} of the flop",
            ]
        else:
            told = ["nothing splits over units, so replicas have one rank each (data parallelism)"]
        unfollowed = sum(len(part.names) for part in self.unfollowed)
        if unfollowed:
            told.append(f"not followed: {unfollowed} module{'s' * (unfollowed > 1)} (describe() says why)")
        if not self.sampled:
            told.append("without sample= only pairs of linear layers are found")
        return f"{self.network}: {'; '.join(told)}"

    def text(self, *, width: int) -> str:
        """All of it, in lines of at most `width` characters, where names are not longer."""
        return "\n".join(self._lines(width))

    def __str__(self) -> str:
        return self.text(width=min(_WIDEST, shutil.get_terminal_size().columns))

    def _lines(self, width: int) -> Iterator[str]:
        if self.stages is not None:
            yield f"{self.network}: {self.stages.text(width=width)}"
            if not self.stages.shares_units:
                return
        if self.split:
            yield from _wrapped(
                f"{self.network}: {percent(1 - self.repeated_fraction)} of the flop is split over units, "
                f"{percent(self.repeated_fraction)} is repeated on every rank of a replica.",
                width,
            )
            yield "split"
            longest = max(len(part.words) for part in self.split)
            for part in self.split:
                lead = f"{_INDENT}{part.words:<{longest}}  {percent(part.flop_fraction):>5} of the flop  "
                yield from _wrapped(ranges(part.names), width, lead=lead)
        else:
            yield from _wrapped(
                f"{self.network}: nothing in it splits over units, so replicas have one rank each: data parallelism, weighted "
                "by speed.",
                width,
            )
        if self.repeated:
            parameters, frozen = (sum(map(attrgetter(each), self.repeated)) for each in ("parameters", "frozen"))
            counts = [f"{parameters:,} of {self.parameters:,} trained"] * bool(self.parameters)
            counts += [f"{frozen:,} of {self.frozen:,} frozen"] * bool(self.frozen)
            yield f"repeated: {' and '.join(counts)} weights"
            for repeated in self.repeated:
                sizes = [f"{repeated.parameters:,}"] * bool(repeated.parameters)
                sizes += [f"{repeated.frozen:,} frozen"] * bool(repeated.frozen)
                sizes += [f"{percent(repeated.flop_fraction)} of the flop"] * (repeated.flop_fraction >= _LEAST_FLOP)
                lead = f"{_INDENT}{repeated.layer}: "
                yield from _wrapped(f"{ranges(repeated.names)} ({', '.join(sizes)})", width, lead=lead)
                yield from _wrapped(repeated.reason, width, lead=2 * _INDENT)
            rest = self.repeated_fraction - sum(part.flop_fraction for part in self.repeated)
            if self.sampled and rest >= _LEAST_REST:
                yield f"{_INDENT}operations without weights of their own ({percent(rest)} of the flop)"
        if self.unfollowed:
            yield "not followed"
            for told in self.unfollowed:
                yield from _wrapped(f"{ranges(told.names)} ({told.layer}): {told.reason}", width, lead=_INDENT)
                yield from _wrapped(f"What to do: {told.hint}.", width, lead=2 * _INDENT)
        if not self.sampled:
            yield from _wrapped(
                "No sample batch was given, so only pairs of linear layers were looked for. Give tile(..., sample=x[:4]) to "
                "find attention, gated and convolution pairs.",
                width,
            )


def describe(model: nn.Module, found: Blocks, *, workload: Workload) -> Description:
    """Describe what `find_blocks` found in `model`, which is still whole.

    Args:
        model: the network.
        found: its blocks.
        workload: what they make (`workload_of`); its batch does not matter.
    """
    whole = workload.flop(width=1.0, height=1.0) or 1.0
    alike: dict[tuple[str, str, int], list[tuple[str, float]]] = {}
    for block in found.blocks:
        if not block.begins:
            continue
        facts = block.facts
        share = workload.samples * facts.flop_per_unit * facts.units / whole
        # A block at the top of the network has no module of its own to be called by.
        name = facts.name or ", ".join(sorted({tensor.rpartition(".")[0] or tensor for tensor in block.cuts}))
        alike.setdefault((facts.kind, facts.unit, facts.units), []).append((name, share))
    split = tuple(
        SplitPart(
            kind=kind,
            unit=unit,
            units=units,
            names=tuple(name for name, _ in each),
            flop_fraction=sum(share for _, share in each),
        )
        for (kind, unit, units), each in alike.items()
    )
    return Description(
        network=type(model).__name__,
        split=split,
        repeated=tuple(
            sorted(
                _repeated(model, found, whole_flop=whole / workload.samples), key=lambda part: (-part.parameters, -part.frozen)
            )
        ),
        unfollowed=_unfollowed(model, found),
        parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        frozen=sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad),
        repeated_fraction=workload.flop_per_width / whole,
        sampled=found.captured is not None,
    )


def _repeated(model: nn.Module, found: Blocks, *, whole_flop: float) -> Iterator[RepeatedPart]:
    """What is repeated, one part for each class and reason."""
    tiled = {name for block in found.blocks for name in block.cuts}
    flop = _own_flop(found)
    sizes: dict[tuple[str, str], dict[str, Counter[bool]]] = {}
    reasons: dict[tuple[str, str], set[str]] = {}
    for owner, module in model.named_modules():
        own = dict(module.named_parameters(prefix=owner, recurse=False))
        whole = {name: parameter for name, parameter in own.items() if name not in tiled}
        kind, reason = type(module).__name__, ""
        matrix = next((name for name, parameter in whole.items() if parameter.dim() > 1), None)
        if len(whole) < len(own):
            flop.pop(owner, None)
            kind = f"{kind}, beside what is split of it" if matrix else _BIASES
        if matrix and found.captured is not None:
            reason = _reason(matrix, owner, module, found)
        for parameter in whole.values():
            key = kind, _NUMBER.sub(".*", reason)  # equal layers of which each is named in its reason are one part
            reasons.setdefault(key, set()).add(reason)
            counts = sizes.setdefault(key, {}).setdefault(owner, Counter())
            counts[parameter.requires_grad] += parameter.numel()
    for (kind, reason), owners in sizes.items():
        total = sum(owners.values(), Counter())
        yield RepeatedPart(
            layer=kind,
            names=tuple(owners),
            parameters=total[True],
            frozen=total[False],
            flop_fraction=_WITH_BACKWARD * sum(flop.get(owner, 0.0) for owner in owners) / whole_flop,
            reason=min(reasons[kind, reason]) if len(reasons[kind, reason]) == 1 else reason,
        )


def _own_flop(found: Blocks) -> dict[str, float]:
    """Flop of one sample in the forward pass of each module, without the modules inside of it."""
    flop = {} if found.captured is None else dict(found.captured.flop)
    for name, all_of_it in list(flop.items()):
        if name:
            around = name.rpartition(".")[0]
            flop[around] = flop.get(around, 0.0) - all_of_it
    return flop


def _reason(name: str, owner: str, module: nn.Module, found: Blocks) -> str:
    """Why the weight `name` of the layer `owner` is whole."""
    if isinstance(module, nn.Embedding):
        return f"its rows are looked up: only the largest vocabulary of at least {FEWEST_ROWS} rows is split"
    if isinstance(module, nn.RNNBase):
        return "every step of a recurrent layer needs its whole state"
    if name in found.stops:
        return found.stops[name]
    around = next((each for each in _with_those_around(owner) if each in found.reasons), None)
    if around is not None:
        return f"{ranges([around])} is not followed, see below"
    if found.captured is not None and owner not in found.captured.calls:
        return "it is not called for the sample batch, or in several ways"
    return "its outputs do not end in the sum of a later layer alone"


def _with_those_around(name: str) -> Iterator[str]:
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name


def _unfollowed(model: nn.Module, found: Blocks) -> tuple[UnfollowedPart, ...]:
    alike: dict[tuple[str, str], list[str]] = {}
    reasons = found.reasons.items()
    for name, reason in reasons:
        within = f"{name}." if name else ""
        if any(other != name and other.startswith(within) and other_reason == reason for other, other_reason in reasons):
            continue  # what is around a module fails by the same line: told of the innermost
        module = model.get_submodule(name)
        told = _COMPUTED if isinstance(module, ParametrizationList) else reason
        alike.setdefault((type(module).__name__, told), []).append(name)
    return tuple(
        UnfollowedPart(
            layer=kind, names=tuple(names), reason=reason, hint=next((hint for word, hint in _HINTS if word in reason), _HINT)
        )
        for (kind, reason), names in alike.items()
    )


def ranges(names: Sequence[str]) -> str:
    """Names in a line; those that differ in consecutive numbers alone are one: "layers.0-11.mlp, head"."""
    found = [name.split(".") if name else ["the network itself"] for name in dict.fromkeys(names)]
    for place in range(max((len(parts) for parts in found), default=0)):
        found = _joined(found, place)
    return ", ".join(".".join(parts) for parts in found)


def _joined(names: list[list[str]], place: int) -> list[list[str]]:
    """Numbers at this place, counted from the end, made ranges."""
    alike: dict[tuple[str, ...], list[list[str]]] = {}
    for parts in names:
        at = len(parts) - 1 - place
        numbered = at >= 0 and parts[at].isdecimal()
        alike.setdefault((*parts[:at], "#", *parts[at + 1 :]) if numbered else tuple(parts), []).append(parts)
    result = []
    for shape, each in alike.items():
        at = len(shape) - 1 - place
        numbers = [int(parts[at]) for parts in each] if len(each) > 1 else []
        if numbers and numbers == list(range(numbers[0], numbers[-1] + 1)):
            result.append([*shape[:at], f"{numbers[0]}-{numbers[-1]}", *shape[at + 1 :]])
        else:
            result += each
    return result


def percent(fraction: float) -> str:
    """In whole ones, and less than one as such: what is repeated is never "0 %"."""
    return "< 1 %" if 0 < fraction < 0.01 else "> 99 %" if 0.99 < fraction < 1 else f"{fraction:.0%}".replace("%", " %")


def _wrapped(text: str, width: int, *, lead: str = "") -> list[str]:
    hanging = " " * len(lead) if len(lead) < width // 2 else 3 * _INDENT
    return textwrap.wrap(
        text, width, initial_indent=lead, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
    )
