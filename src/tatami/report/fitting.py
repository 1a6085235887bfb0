"""Lettering that fits into boxes: the largest readable form of each label, and a number where none fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

SIZES_PT = (11.0, 10.0, 9.0, 8.0, 7.0, 6.0)
KEY_SIZES_PT = (8.0, 7.0, 6.0, 5.0)
LINE_SPACING = 1.3
MARGIN_PT = 2.0


@dataclass(frozen=True, kw_only=True)
class Box:
    """The room for one label, in points."""

    width_pt: float
    height_pt: float


@dataclass(frozen=True, kw_only=True)
class Lettering:
    """What is written into a box.

    Attributes:
        text: empty where nothing fits at all.
        upright: turned by 90 degrees.
        key: the number that is written and stands for the name; None where it is not a number.
    """

    text: str
    size_pt: float
    upright: bool = False
    key: int | None = None


def fit_lettering(boxes: Sequence[Box], *, texts: Sequence[tuple[str, str]]) -> list[Lettering]:
    """For each box its (name, share) in one or two lines, else the name alone, else a key counted from 1, else nothing."""
    result = []
    keys = 0
    for box, (name, share) in zip(boxes, texts, strict=True):
        letters = _best_fit([[f"{name}\n{share}", f"{name} {share}"], [name]], box=box, sizes_pt=SIZES_PT)
        if letters is None:
            number = _best_fit([[str(keys + 1)]], box=box, sizes_pt=KEY_SIZES_PT)
            keys += number is not None
            letters = replace(number, key=keys) if number else Lettering(text="", size_pt=0.0)
        result.append(letters)
    return result


def _best_fit(choices: Sequence[Sequence[str]], *, box: Box, sizes_pt: Sequence[float]) -> Lettering | None:
    """The largest lettering of the first choice that fits, horizontal; turned only where no choice fits horizontally."""
    for upright in (False, True):
        width_pt, height_pt = (box.height_pt, box.width_pt) if upright else (box.width_pt, box.height_pt)
        for forms in choices:
            for size_pt in sizes_pt:
                for form in forms:
                    lines = form.split("\n")
                    wide = max(_width_em(line) for line in lines) * size_pt
                    high = len(lines) * LINE_SPACING * size_pt
                    if wide + 2 * MARGIN_PT <= width_pt and high <= height_pt:
                        return Lettering(text=form, size_pt=size_pt, upright=upright)
    return None


@cache
def _width_em(line: str) -> float:
    """The width of `line` in matplotlib's own font, as a multiple of the font size."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextToPath

    width, _, _ = TextToPath().get_text_width_height_descent(line, FontProperties(size=100), ismath=False)
    return float(width) / 100
