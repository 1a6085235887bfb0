"""Output files: nothing is overwritten unasked, and a reader sees the old file or the new one, never a part."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tatami.errors import OutputExistsError


def refuse_to_overwrite(path: Path | str, *, force: bool) -> None:
    """Check an output before the work that it is for.

    Raises:
        OutputExistsError: `path` exists and `force` was not given.
    """
    if Path(path).exists() and not force:
        raise OutputExistsError(f"{path} exists already; choose another name, or overwrite it with force (--force)")


def write_text(path: Path | str, text: str, *, force: bool = False) -> None:
    """Write `text` as UTF-8 in one step, making the folders above it.

    Raises:
        OutputExistsError: `path` exists and `force` was not given; also where it came to be in the meantime.
    """
    path = Path(path)
    refuse_to_overwrite(path, force=force)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        part = Path(folder, path.name)
        part.write_text(text, encoding="utf-8")
        if force:
            os.replace(part, path)
            return
        try:
            os.link(part, path)  # unlike a rename, it fails where another process was quicker
        except FileExistsError:
            refuse_to_overwrite(path, force=False)
            raise
