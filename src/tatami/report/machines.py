"""What each machine does in an iteration of a plan: a line with a bar for each, or for all that do about the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tatami.cluster import Cluster
from tatami.report.tables import Table, table_of
from tatami.report.words import in_order, percent
from tatami.tiling import Plan, ProcessorTime
from tatami.units import format_duration, format_size

MOST_LINES = 12
"""Machines that do about the same share a line where there would be more lines."""
LEAST_BAR, MOST_BAR = 8, 40
COMPUTES, SENDS, WAITS = "█", "▒", "·"
_GAP = 2
_FINEST = 0.05
"""Machines that differ by less are similar, if there are too many for a line each; twice as much, and so on, if need be."""
_SHOWN_FROM = 0.01
"""Smallest part of an iteration for which a column of sending or waiting is shown."""


@dataclass(frozen=True, kw_only=True)
class MachineLine:
    """What one machine does in an iteration of a plan.

    Attributes:
        time: seconds of computing, sending and waiting.
        replica: which one it is part of, from 1; None where every machine is a replica.
        samples: of its replica.
        micro_batches: in which its replica computes them.
        units_fraction: its share of its replica's units.
        memory_bytes: what it will keep.
        memory_given_bytes: None where that is not known.
        stage: which pipeline stage it computes, from 1; None where there are none.
        pieces: the names of the first and the last piece of the network that it computes; empty where there are no stages.
    """

    time: ProcessorTime
    replica: int | None
    samples: int
    micro_batches: int
    units_fraction: float
    memory_bytes: float
    memory_given_bytes: int | None
    stage: int | None = None
    pieces: str = ""


def machine_lines(plan: Plan, *, cluster: Cluster, times: Sequence[ProcessorTime]) -> tuple[MachineLine, ...]:
    """One line for each processor that has a tile; `times` as `tatami.tiling.timeline` has them.

    In the order of the cluster, replica by replica.
    """
    is_tiled = len(plan.layout.replicas) < len(plan.layout.processors)
    time_of = {time.processor: time for time in times}
    shown = in_order(plan.tiling, cluster.by_name)
    micro_batches = {
        name: len(own.micro_batch_sizes(samples))
        for own, samples in zip(plan.layout.replicas, plan.layout.sample_sizes(plan.tiling.samples), strict=True)
        for name in own.processors
    }
    return tuple(
        MachineLine(
            time=time_of[tile.processor],
            replica=tile.replica + 1 if is_tiled else None,
            samples=tile.samples.size,
            micro_batches=micro_batches[tile.processor],
            units_fraction=tile.units.size / plan.tiling.units,
            memory_bytes=plan.memory_bytes.get(tile.processor, 0.0),
            memory_given_bytes=cluster.by_name[tile.processor].memory_bytes,
        )
        for tile in shown.tiles
    )


def display_names(cluster: Cluster) -> dict[str, str]:
    """What machines are called: as their hosts, where every host has one processor; without a domain that all have."""
    own = cluster.host_of
    names = own if len(set(own.values())) == len(own) else {name: name for name in own}
    domains = {name.partition(".")[2] for name in names.values()}
    if len(domains) > 1 or domains == {""}:
        return names
    return {own: name.partition(".")[0] for own, name in names.items()}


def machine_table(lines: Sequence[MachineLine], *, names: Mapping[str, str], width: int) -> Table:
    """The lines as a table, not wider than `width` if that can be; similar machines share a line.

    Args:
        lines: of all machines that have a tile.
        names: what machines are called, by the names of their processors.
    """
    groups = similar(lines)
    total_s = max(each.time.total_s for each in lines)
    sends, waits = (
        max(seconds) > _SHOWN_FROM * total_s
        for seconds in zip(*((each.time.send_s, each.time.wait_s) for each in lines), strict=True)
    )
    is_divided, is_known = any(each.units_fraction < 1 for each in lines), any(each.memory_given_bytes for each in lines)
    is_tiled = any(each.replica for each in lines)
    rows = []
    for first, *others in groups:
        name = names[first.time.processor]
        row = {"machine": f"{1 + len(others)} like {name}" if others else name}
        row |= {"stage": _numbers(each.stage for each in (first, *others)), "pieces": first.pieces} if first.stage else {}
        row |= {"replica": _numbers(each.replica for each in (first, *others))} if is_tiled else {}
        row |= {"samples": _samples([first, *others])}
        row |= {"units": percent(round(first.units_fraction, 3))} if is_divided else {}
        row |= {"": "", "computes": _seconds(first.time.compute_s)}
        row |= {"sends": _seconds(first.time.send_s)} if sends else {}
        row |= {"waits": _seconds(first.time.wait_s)} if waits else {}
        rows.append(row)
    # The bar has what the others leave; to the left of the first column is the mark of the best row, which no row is.
    for is_wide in (True, False):  # memory as it is used and given, or else as a part of what there is
        for row, (first, *_) in zip(rows, groups, strict=True):
            row |= {"memory": _memory(first, is_wide=is_wide)} if is_known else {}
        used = sum(max(len(header), *(len(row[header]) for row in rows)) + _GAP for header in rows[0])
        if width >= used + LEAST_BAR:
            break
    room = min(MOST_BAR, max(LEAST_BAR, width - used))
    for row, (first, *_) in zip(rows, groups, strict=True):
        row[""] = bar(first.time, width=room)
    bars = "".join(row[""] for row in rows)
    kinds = ((COMPUTES, "computes", True), (SENDS, "sends", sends), (WAITS, "waits", waits))
    signs = [f"{sign} {word}" for sign, word, is_column in kinds if is_column or sign in bars]
    return table_of(f"In an iteration ({', '.join(signs)}):", rows, texts=("machine", "pieces", ""))


def similar(lines: Sequence[MachineLine]) -> list[list[MachineLine]]:
    """A group for each line to be shown, led by the one that is most like the others."""
    within = _FINEST
    while True:
        groups = _grouped(lines, within=within)
        if groups is not None:
            return sorted(map(_led, groups), key=lambda group: -group[0].samples) if len(lines) > MOST_LINES else groups
        within *= 2


def _grouped(lines: Sequence[MachineLine], *, within: float) -> list[list[MachineLine]] | None:
    """None where there are too many groups."""
    groups: list[list[MachineLine]] = []
    if len(lines) <= MOST_LINES:
        return [[line] for line in lines]
    for line in lines:
        for group in groups:
            if _alike(line, group[0], within=within):
                group.append(line)
                break
        else:
            if len(groups) == MOST_LINES:
                return None
            groups.append([line])
    return groups


def _alike(one: MachineLine, other: MachineLine, *, within: float) -> bool:
    pairs = (
        (one.samples, other.samples),
        (one.micro_batches, other.micro_batches),
        (one.units_fraction, other.units_fraction),
        (one.time.compute_s, other.time.compute_s),
        (one.time.send_s, other.time.send_s),
    )
    return all(abs(first - second) <= within * max(first, second) for first, second in pairs)


def _led(group: list[MachineLine]) -> list[MachineLine]:
    middle = sorted(group, key=lambda each: each.time.compute_s)[len(group) // 2]
    return [middle, *(each for each in group if each is not middle)]


def bar(time: ProcessorTime, *, width: int) -> str:
    """Computing, sending and waiting as parts of `width` characters."""
    done_s, drawn, text = 0.0, 0, ""
    for sign, seconds in ((COMPUTES, time.compute_s), (SENDS, time.send_s), (WAITS, time.wait_s)):
        done_s += seconds
        end = max(round(width * done_s / time.total_s), drawn, seconds > 0 and sign == COMPUTES) if time.total_s else 0
        text += sign * (end - drawn)
        drawn = end
    return text


def _numbers(of_group: Iterable[int | None]) -> str:
    numbers = sorted({each or 0 for each in of_group})
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} - {numbers[-1]}"


def _samples(group: Sequence[MachineLine]) -> str:
    """How many, of a group from the least to the most; of several micro-batches, how many of them of which size."""
    line = group[0]
    if line.micro_batches > 1:
        size, larger = divmod(line.samples, line.micro_batches)
        counts = ((larger, size + 1), (line.micro_batches - larger, size))
        return " + ".join(f"{count} x {each:,}" if count > 1 else f"{each:,}" for count, each in counts if count and each)
    least, most = (choose(each.samples for each in group) for choose in (min, max))
    return f"{least:,}" if least == most else f"{least:,} - {most:,}"


def _seconds(seconds: float) -> str:
    return format_duration(seconds, digits=3) if seconds else "-"


def _memory(line: MachineLine, *, is_wide: bool) -> str:
    if line.memory_given_bytes is None:
        return "-"
    share = percent(round(line.memory_bytes / line.memory_given_bytes, 2))
    if not is_wide:
        return share
    used, given = (format_size(round(size), digits=3) for size in (line.memory_bytes, line.memory_given_bytes))
    return f"{used} of {given}"
