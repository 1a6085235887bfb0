"""A figure to draw in, and a file to keep it in. No pyplot: no global state, no window, nothing to close."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tatami.errors import InputError, MissingExtraError
from tatami.outputs import check_output, replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".pdf", ".svg")


def blank(*, width_in: float = 8.0, height_in: float = 5.0) -> tuple[Figure, Axes]:
    """A figure of this size in inches with one empty axes, whose layout makes room for all labels.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingExtraError("matplotlib", extra="plot") from error
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    return figure, figure.add_subplot()


def check_path(path: str | Path, *, force: bool = False) -> Path:
    """Whether a picture can be written to `path`: asked before anything is computed for it.

    Raises:
        InputError: a format that is not written, or a folder that is not there.
        OutputExistsError: the file exists and `force` was not given.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise InputError(
            f"a picture is written as {', '.join(FORMATS)}, not as {path.suffix or 'a file without an ending'!r}: {path}"
        )
    if not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no folder {path.parent}. Make it first")
    check_output(path, force=force)
    return path


def save(figure: Figure, path: str | Path, *, force: bool = False) -> Path:
    """Write `figure` as PNG (150 dots per inch), PDF or SVG, by the ending of `path`. Raises as `check_path`."""
    path = check_path(path, force=force)
    with replacing(path, force=force) as part:
        figure.savefig(part, dpi=150, format=path.suffix.lower().removeprefix("."))
    return path
