"""What one forward pass does, as a list of operations, and what follows from cutting that list into stages.

A *program* is recorded once (`tatami.stages.recording`). Its operations are numbered in the order of execution. An
operation is a call of a leaf module, or a function call outside of one, such as the addition of a residual connection.
Cutting the list at some numbers gives stages: operation n belongs to the stage whose range contains n. Data then flows from
earlier stages to later ones only, whatever the network looks like: skip connections, several inputs and outputs, and modules
that are called twice are all the same case, a value that an operation of a later stage reads.

Two kinds of values need no stage. A value that depends on the inputs alone (a causal mask, position numbers) is computed by
every rank: it costs little, and Python may branch on it. A value that depends on parameters alone, through functions outside
of modules (`self.positions[:length]`), *floats*: each stage that reads it computes it from the parameters, which this stage
then holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import chain
from typing import Any

from tatami.errors import ModelError


class Reach(Enum):
    """Where an operation is computed."""

    EVERYWHERE = "everywhere"
    """By every rank: it depends on the inputs alone."""
    FLOATING = "floating"
    """By each stage that reads the result: it depends on parameters alone."""
    STAGED = "staged"
    """By the ranks of one stage."""


@dataclass(frozen=True, kw_only=True)
class ForwardValue:
    """A tensor that an operation makes.

    Attributes:
        number: of the value, in the order in which values are made.
        made_by: number of the operation.
        size_bytes: for the sample that was recorded.
        requires_grad: whether a gradient flows back to it.
        reach: that of the operation which made it.
    """

    number: int
    made_by: int
    size_bytes: int
    requires_grad: bool
    reach: Reach


@dataclass(frozen=True, kw_only=True)
class ForwardOperation:
    """One call of a leaf module, or of a function outside of leaf modules.

    Attributes:
        number: position in the program.
        name: the module's path, or the function's name.
        module: whether it is a leaf module's call.
        reads: numbers of the values it reads.
        makes: numbers of the values it makes; None for a tensor that it returns as it came (an input, a parameter).
        parameters: names of the parameters it reads.
        buffers: names of the buffers it reads or changes.
        updates: names of those that it changes.
        changes: numbers of values, made before, whose memory it changes in place; what they are afterwards is among `makes`.
        returns_change: whether the changed tensor is its result, and that is used (`x += y`): after `x.add_(y)` Python
            goes on with the old name of it.
        line: where the user's code calls it, as `file:line`; empty where that is not known.
        flop, kept_bytes: of its forward pass over the sample that was recorded, and what it keeps for the backward pass.
    """

    number: int
    name: str
    module: bool
    reads: tuple[int, ...]
    makes: tuple[int | None, ...]
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    changes: tuple[int, ...] = ()
    returns_change: bool = True
    reach: Reach
    line: str = ""
    flop: float = 0.0
    kept_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ForwardForm:
    """The shape of a tensor that a call returned, told by a tensor that the call was given.

    Attributes:
        like: position among the tensors that were given: one of the same dtype, and of the same shape where it has axes.
        has_axes: whether the result does.
    """

    like: int
    has_axes: bool


@dataclass(frozen=True, kw_only=True)
class ForwardCall:
    """One call of a module, and the operations that it consists of.

    Attributes:
        module: its path.
        first, stop: its operations are those from `first` up to, not including, `stop`.
        returns: for each tensor that it returns, in the order of the flattened result, the number of the value; None for a
            tensor that no operation made.
        looks: whether Python sees values inside of it that not every rank has (`.item()`, `torch.nonzero`), so that it runs
            nowhere but on its own stage.
        result: where it looks: its result, with a `ForwardForm` for each tensor; None where no form is known, or where random
            numbers are drawn, which all stages have to draw.
    """

    module: str
    first: int
    stop: int
    returns: tuple[int | None, ...]
    looks: bool = False
    result: Any = None


@dataclass(frozen=True, kw_only=True)
class ForwardLook:
    """Python sees a value, or a shape that depends on values: `.item()`, `if x.sum() > 0`, `torch.nonzero`.

    Attributes:
        value: number of the value that is seen; None where an operation makes a shape of values.
        made_by: number of the operation that made the value, or the shape.
        calls: positions, among the calls of the program, of those that it is inside of.
        line: where the user's code does it, as `file:line`; empty where that is not known.
    """

    value: int | None
    made_by: int
    calls: tuple[int, ...]
    line: str


@dataclass(frozen=True, kw_only=True)
class ForwardProgram:
    """One forward pass.

    Attributes:
        operations: in the order of execution.
        values: by number.
        calls: of modules, each before the calls inside of it.
        returns: for each tensor that the network returns, the number of its value; None for an input that it returns.
        looks: at values that not every rank has.
        samples: how many were recorded.
    """

    operations: tuple[ForwardOperation, ...]
    values: tuple[ForwardValue, ...]
    calls: tuple[ForwardCall, ...]
    returns: tuple[int | None, ...]
    looks: tuple[ForwardLook, ...] = ()
    samples: int = 1

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """For each value, the numbers of the operations that read it."""
        found: dict[int, list[int]] = {}
        for operation in self.operations:
            for number in operation.reads:
                found.setdefault(number, []).append(operation.number)
        return {number: tuple(each) for number, each in found.items()}

    def crossing_bytes(self) -> list[int]:
        """For each operation n, how many bytes cross a cut in front of it, for the sample that was recorded."""
        ends: dict[int, int] = {}
        for operation in self.operations:
            if operation.reach is Reach.STAGED:
                for number in operation.reads:
                    ends[number] = operation.number
        stop = len(self.operations)
        for returned in self.returns:
            if returned is not None:
                ends[returned] = stop
        change = [0] * (stop + 2)
        for number, last in ends.items():
            value = self.values[number]
            if value.reach is Reach.STAGED and last > value.made_by:
                change[value.made_by + 1] += value.size_bytes
                change[last + 1] -= value.size_bytes
        total, found = 0, []
        for each in change[: stop + 1]:
            total += each
            found.append(total)
        return found[:stop]


@dataclass(frozen=True, kw_only=True)
class Handover:
    """A value that one stage makes and a later one reads.

    Attributes:
        value: its number.
        source, target: the stages.
        requires_grad: whether its gradient came back when the network was recorded; weights may be frozen since.
    """

    value: int
    source: int
    target: int
    requires_grad: bool


@dataclass(frozen=True, kw_only=True)
class Staging:
    """A program, cut into stages.

    Attributes:
        program: what is cut.
        cuts: number of the first operation of each stage but the first, ascending.
        also_updated: buffers that stages change in another program of the network, as in training.

    Raises:
        ModelError: the program cannot be cut there; says why, and at which line of the network.
    """

    program: ForwardProgram
    cuts: tuple[int, ...]
    also_updated: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        stop = len(self.program.operations)
        if list(self.cuts) != sorted(set(self.cuts)) or not all(0 < cut < stop for cut in self.cuts):
            raise ModelError(f"cuts must ascend and lie between 1 and {stop - 1}, not {self.cuts}")
        if self.cuts:
            self._refuse_looks()
            self._refuse_changes()
            self._refuse_hidden_values()
            self._refuse_split_updates()

    @property
    def num_stages(self) -> int:
        return len(self.cuts) + 1

    def stage_of(self, operation: int) -> int:
        """The stage that this operation belongs to."""
        return bisect_right(self.cuts, operation)

    @cached_property
    def handovers(self) -> tuple[Handover, ...]:
        """What crosses, in the order in which it is made; the network's results cross to the last stage."""
        found: dict[tuple[int, int], None] = {}
        for number, target in self._staged_reads():
            source = self.stage_of(self.program.values[number].made_by)
            if source < target:
                found[number, target] = None
        return tuple(
            Handover(
                value=number,
                source=self.stage_of(self.program.values[number].made_by),
                target=target,
                requires_grad=self.program.values[number].requires_grad,
            )
            for number, target in sorted(found)
        )

    @cached_property
    def parameters(self) -> tuple[tuple[str, ...], ...]:
        """For each stage, the names of the parameters that its operations read; one that is read in two stages is in both."""
        return self._names(lambda operation: operation.parameters)

    @cached_property
    def buffers(self) -> tuple[tuple[str, ...], ...]:
        """For each stage, the names of the buffers that its operations read or change."""
        return self._names(lambda operation: operation.buffers)

    def is_on(self, stage: int | None, name: str) -> bool:
        """Whether a rank of a stage, None for one without, has a parameter or buffer: all have what no operation reads."""
        readers = self._readers.get(name, ())
        return not readers or stage in readers

    @cached_property
    def updated(self) -> frozenset[str]:
        """The buffers that stages change, such as running means; what changes them alone (a counter) runs on every rank."""
        weighed = (each for each in self.program.operations if each.reach is not Reach.EVERYWHERE)
        return self.also_updated.union(*(each.updates for each in weighed))

    @cached_property
    def _readers(self) -> Mapping[str, frozenset[int]]:
        """The stages that read a parameter or buffer."""
        found: dict[str, set[int]] = {}
        for stage, names in enumerate(zip(self.parameters, self.buffers, strict=True)):
            for name in chain.from_iterable(names):
                found.setdefault(name, set()).add(stage)
        return {name: frozenset(stages) for name, stages in found.items()}

    @cached_property
    def blocks(self) -> Mapping[int, tuple[ForwardCall, int | None]]:
        """The calls that are run or left out as a whole: by their first operation, the outermost call whose staged operations
        all belong to one stage, and that stage; None where every rank runs it.

        Where an outer and an inner call begin with the same operation, the outer one is meant, if it qualifies. One that looks
        at values qualifies where the form of its result is known: other stages cannot run it on stand-ins.
        """
        found: dict[int, tuple[ForwardCall, int | None]] = {}
        covered = 0
        for call in self.program.calls:
            if call.first < covered or call.stop == call.first or (call.looks and call.result is None):
                continue
            operations = self.program.operations[call.first : call.stop]
            stages = {self.stage_of(each.number) for each in operations if each.reach is Reach.STAGED}
            if len(stages) > 1 or any(each.reach is Reach.FLOATING for each in operations):
                continue
            # A counter goes on in every rank, as no rank is left out of the call.
            if stages and any(each.reach is Reach.EVERYWHERE and {*each.updates} - self.updated for each in operations):
                continue
            if stages and any(self._is_needed_everywhere(number, call) for each in operations for number in each.makes):
                continue
            found[call.first] = call, (stages.pop() if stages else None)
            covered = call.stop
        return found

    @cached_property
    def modules(self) -> Mapping[str, int]:
        """The modules all of whose calls one stage runs as a whole, and that stage."""
        found: dict[str, set[int | None]] = {}
        around: tuple[ForwardCall, int | None] | None = None
        for call in self.program.calls:
            around = self.blocks.get(call.first, around)
            is_inside = around is not None and around[0].first <= call.first and call.stop <= around[0].stop
            found.setdefault(call.module, set()).add(around[1] if around is not None and is_inside else None)
        return {
            name: stage for name, stages in found.items() if len(stages) == 1 and (stage := min(stages, key=str)) is not None
        }

    def _is_needed_everywhere(self, number: int | None, call: ForwardCall) -> bool:
        """Whether a value that is made inside of this call on every rank is read outside of it."""
        if number is None or self.program.values[number].reach is not Reach.EVERYWHERE:
            return False
        outside = any(not call.first <= reader < call.stop for reader in self.program.readers.get(number, ()))
        return outside or number in call.returns

    def _staged_reads(self) -> Iterable[tuple[int, int]]:
        """Every value of a stage that an operation of a stage reads, and that stage."""
        values = self.program.values
        for operation in self.program.operations:
            if operation.reach is Reach.STAGED:
                for number in operation.reads:
                    if values[number].reach is Reach.STAGED:
                        yield number, self.stage_of(operation.number)
        for look in self.program.looks:
            around = self._around(look)
            if look.value is not None and values[look.value].reach is Reach.STAGED and around is not None:
                yield look.value, self.stage_of(around.first)
        for returned in self.program.returns:
            if returned is not None and values[returned].reach is Reach.STAGED:
                yield returned, self.num_stages - 1

    def _around(self, look: ForwardLook) -> ForwardCall | None:
        """The call that one stage runs as a whole, and that looks."""
        blocks = (self.blocks.get(self.program.calls[place].first, (None, None)) for place in look.calls)
        inside = {id(self.program.calls[place]) for place in look.calls}
        return next((call for call, stage in blocks if stage is not None and id(call) in inside), None)

    def _names(self, names_of: Callable[[ForwardOperation], tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
        found: list[dict[str, None]] = [{} for _ in range(self.num_stages)]
        needs = self._needs(names_of)
        for operation, names in zip(self.program.operations, needs, strict=True):
            if operation.reach is Reach.STAGED:
                found[self.stage_of(operation.number)] |= names
            elif operation.reach is Reach.EVERYWHERE and self.updated.isdisjoint(names):
                for each in found:
                    each |= names
        for returned in self.program.returns:
            if returned is not None and self.program.values[returned].reach is not Reach.STAGED:
                found[-1] |= needs[self.program.values[returned].made_by]
        return tuple(tuple(each) for each in found)

    def _needs(self, names_of: Callable[[ForwardOperation], tuple[str, ...]]) -> list[dict[str, None]]:
        """For each operation, the names that a rank needs to compute it: its own, and those of values without a stage."""
        needs: list[dict[str, None]] = []
        for operation in self.program.operations:
            names = dict.fromkeys(names_of(operation))
            for value in (self.program.values[number] for number in operation.reads):
                if value.reach is not Reach.STAGED:
                    names |= needs[value.made_by]
            needs.append(names)
        return needs

    def _refuse_split_updates(self) -> None:
        """A buffer that one stage changes would be out of date in another one."""
        needs = self._needs(lambda operation: operation.parameters)
        for operation in self.program.operations:
            for name in operation.updates if operation.reach is not Reach.EVERYWHERE else ():
                own = self.stage_of(operation.number)
                for reader in self._readers.get(name, ()):
                    is_staged = operation.reach is Reach.STAGED
                    if reader != own if is_staged else not all(self.is_on(reader, each) for each in needs[operation.number]):
                        raise ModelError(
                            f"{operation.line or operation.name} changes the buffer {name}, which another stage reads and "
                            "would not see changed. Cut elsewhere (layout=), or use one stage"
                        )

    def _refuse_looks(self) -> None:
        for look in self.program.looks:
            if self._around(look) is None:
                made = self.program.operations[look.made_by]
                raise ModelError(
                    f"{look.line or 'the forward pass'} looks at a value that {made.name} computes, and the ranks of other "
                    "stages do not have it. Compute with tensors in place of Python numbers there, look inside of a module "
                    "that draws no random numbers and returns a tensor of the shape of its input, or use one stage"
                )

    def _refuse_changes(self) -> None:
        """In-place changes of a tensor that has crossed, or will cross, would be seen by one stage only."""
        crossing = {each.value for each in self.handovers}
        for operation in self.program.operations:
            for number in operation.changes:
                value = self.program.values[number]
                if value.reach is not Reach.STAGED:
                    continue
                hidden = not operation.returns_change and any(made in crossing for made in operation.makes)
                if hidden or number in crossing or self.stage_of(value.made_by) != self.stage_of(operation.number):
                    raise ModelError(
                        f"{operation.line or operation.name} changes a tensor in place ({operation.name}) that two stages "
                        "hold, and the other one would not see it. Write x = x + y in place of x += y, or cut elsewhere"
                    )

    def _refuse_hidden_values(self) -> None:
        """A value that crosses must be returned by the outermost call that made it: only results are handed over."""
        inside: dict[int, ForwardCall] = {}
        for call, _ in self.blocks.values():
            for number in range(call.first, call.stop):
                inside[number] = call
        for each in self.handovers:
            around = inside.get(self.program.values[each.value].made_by)
            if around is not None and each.value not in around.returns:
                made = self.program.operations[self.program.values[each.value].made_by]
                raise ModelError(
                    f"{made.name} computes a tensor that stage {each.target} reads, but {around.module} does not return it. "
                    "Return it, or cut elsewhere"
                )


def obstacle_of(program: ForwardProgram, cut: int) -> str | None:
    """Why the program cannot be cut in front of this operation; None where it can be."""
    try:
        Staging(program=program, cuts=(cut,))
    except ModelError as error:
        return str(error)
    return None
