"""A tiling drawn with characters, for a terminal or a README without pictures."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from tatami.errors import InputError
from tatami.report.words import ALIKE, check_speeds, idle, in_order, percent, share, working
from tatami.tiling import Tile, Tiling, largest_remainder

MIN_WIDTH = 24
MIN_INSIDE = 4
"""Characters between the borders of the narrowest replica that is still drawn."""
LINES = 13
"""Lines of a drawing in which no replica needs more."""
MAX_MATS = 16
"""Most tiles of one replica; with more the drawing would be longer than a screen, and a list of bars is drawn."""
# By which of up, down, left, right a border goes on from here.
BORDERS = dict(zip(("", "ud", "lr", "dr", "dl", "ur", "ul", "udr", "udl", "dlr", "ulr", "udlr"), " │─┌┐└┘├┤┬┴┼", strict=True))
SHADES = " ░▒▓"
"""From the slowest to the fastest quarter of the range of speeds."""


def draw_text(tiling: Tiling, *, speeds: Mapping[str, float], width: int = 72) -> str:
    """The tiles of `tiling` in characters: samples across, units down, darker where faster; not wider than `width`.

    Replicas are as wide, and tiles as high, as their shares, down to what a label needs. Where a name does not fit, a number
    stands for it, explained below. Where there is no room for all replicas, or a replica has more than 16 tiles, a list of bars
    is drawn instead.

    Raises:
        InputError: a width under 24 characters.
        PlanError: a processor of the tiling has no speed.
    """
    if width < MIN_WIDTH:
        raise InputError(f"a drawing needs a width of at least {MIN_WIDTH} characters, not {width}")
    check_speeds(tiling, speeds=speeds)
    tiling = in_order(tiling, speeds)
    replicas = [tuple(tile for tile in replica if tile.area) for replica in tiling.replicas]
    replicas = [replica for replica in replicas if replica]
    inside = width - len(replicas) - 1
    if inside < MIN_INSIDE * len(replicas) or max(map(len, replicas)) > MAX_MATS:
        lines = _bars(tiling, width=width)
    else:
        lines = _floor(tiling, replicas=replicas, speeds=speeds, inside=inside)
    unused = idle(tiling, speeds=speeds)
    if unused:
        lines += textwrap.wrap(f"without work: {', '.join(unused)}", width, subsequent_indent="  ")
    return "\n".join(lines)


def _floor(tiling: Tiling, *, replicas: Sequence[tuple[Tile, ...]], speeds: Mapping[str, float], inside: int) -> list[str]:
    widths = _stretched([replica[0].samples.size for replica in replicas], total=inside, least=MIN_INSIDE)
    rows = max(LINES, *(2 * len(replica) + 1 for replica in replicas))
    width = inside + len(replicas) + 1
    names = _names(tiling, replicas=replicas, widths=widths)
    canvas = [[" "] * width for _ in range(rows)]
    edges: set[tuple[int, int]] = set()
    left = 0
    for replica, across in zip(replicas, widths, strict=True):
        right = left + across + 1
        # Between the top and the bottom line lie the tiles and one border below each but the last.
        heights = _stretched([tile.units.size for tile in replica], total=rows - len(replica) - 1, least=1)
        top = 0
        for tile, down in zip(replica, heights, strict=True):
            bottom = top + down + 1
            edges |= {(row, col) for row in (top, bottom) for col in range(left, right + 1)}
            edges |= {(row, col) for row in range(top, bottom + 1) for col in (left, right)}
            shade = _shade(speeds[tile.processor], speeds=[speeds[other.processor] for other in working(tiling)])
            label = _label(names[tile.processor], percent(share(tile, tiling=tiling)), across=across, down=down)
            for row, line in enumerate(_filled(label, across=across, down=down, shade=shade), start=top + 1):
                canvas[row][left + 1 : right] = line
            top = bottom
        left = right
    for row, col in edges:
        around = {"u": (row - 1, col), "d": (row + 1, col), "l": (row, col - 1), "r": (row, col + 1)}
        canvas[row][col] = BORDERS["".join(way for way, place in around.items() if place in edges)]
    lines = ["".join(line) for line in canvas]
    lines += textwrap.wrap(f"{tiling.samples} samples across, {tiling.units} units down; darker is faster", width)
    return lines + _key([(names[tile.processor], tile) for tile in working(tiling)], tiling=tiling, width=width)


def _key(named: Sequence[tuple[str, Tile]], *, tiling: Tiling, width: int) -> list[str]:
    """What the numbers stand for, in as many columns as fit."""
    entries = [
        f"{key} = {tile.processor}, {percent(share(tile, tiling=tiling))}" for key, tile in named if key != tile.processor
    ]
    if not entries:
        return []
    entry_width = max(map(len, entries)) + 3
    per_line = max(1, (width + 3) // entry_width)
    return [
        "".join(entry.ljust(entry_width) for entry in entries[start : start + per_line]).rstrip()
        for start in range(0, len(entries), per_line)
    ]


def _stretched(sizes: Sequence[int], *, total: int, least: int) -> tuple[int, ...]:
    """`total` in proportion to `sizes`, but no share is less than `least`."""
    small: set[int] = set()
    while True:
        rest = [index for index in range(len(sizes)) if index not in small]
        if not rest:
            return (least,) * len(sizes)
        given = largest_remainder([sizes[index] for index in rest], total=total - least * len(small))
        short = {index for index, size in zip(rest, given, strict=True) if size < least}
        if not short:
            lengths = dict(zip(rest, given, strict=True))
            return tuple(lengths.get(index, least) for index in range(len(sizes)))
        small |= short


def _names(tiling: Tiling, *, replicas: Sequence[tuple[Tile, ...]], widths: Sequence[int]) -> dict[str, str]:
    """What is written for each processor: its name, or a number where one name does not fit with a blank at either side."""
    room = {tile.processor: across for replica, across in zip(replicas, widths, strict=True) for tile in replica}
    names = {}
    key = 0
    for tile in working(tiling):
        if len(tile.processor) <= room[tile.processor] - 2:
            names[tile.processor] = tile.processor
        else:
            key += 1
            names[tile.processor] = str(key)
    return names


def _label(name: str, amount: str, *, across: int, down: int) -> list[str]:
    """Name and share below each other or beside each other, else the name alone."""
    if down >= 2 and len(amount) <= across - 2:
        return [name, amount]
    together = f"{name} {amount}"
    return [together] if len(together) <= across - 2 else [name]


def _filled(label: Sequence[str], *, across: int, down: int, shade: str) -> list[str]:
    """`down` lines of `across` characters: the label in the middle, with a blank around it, on its shade."""
    above = (down - len(label)) // 2
    lines = [shade * across] * down
    widest = max(map(len, label))
    for row, text in enumerate(label, start=above):
        lines[row] = f" {text.center(widest)} "[:across].center(across, shade)
    return lines


def _shade(speed: float, *, speeds: Sequence[float]) -> str:
    low, high = min(speeds), max(speeds)
    if low > (1 - ALIKE) * high:
        return SHADES[1]
    return SHADES[min(int(len(SHADES) * (speed - low) / (high - low)), len(SHADES) - 1)]


def _bars(tiling: Tiling, *, width: int) -> list[str]:
    """One line for each processor, as long as its share."""
    tiles = working(tiling)
    amounts = [percent(share(tile, tiling=tiling)) for tile in tiles]
    name_width = min(max(len(tile.processor) for tile in tiles), width // 3)
    amount_width = max(map(len, amounts))
    most = max(tile.area for tile in tiles)
    room = width - name_width - amount_width - 2
    lines = []
    for tile, amount in zip(tiles, amounts, strict=True):
        # The end tells processors apart that were named in a row.
        name = tile.processor if len(tile.processor) <= name_width else "…" + tile.processor[1 - name_width :]
        bar = "█" * max(1, round(room * tile.area / most))
        lines.append(f"{name:<{name_width}} {amount:>{amount_width}} {bar}")
    lines.append(f"shares of {tiling.samples} samples x {tiling.units} units, one tile a line")
    return lines
