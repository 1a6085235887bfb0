"""The folder that Ray keeps its files in, for one run; what a run that was killed has left is removed by the next."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tatami.engine.processes import is_running, machine

_PREFIX = "tatami-"
_OWNER = "owner.json"


@contextmanager
def run_folder(*, parent: Path | None = None) -> Iterator[Path]:
    """A folder of this user alone, until the end.

    Args:
        parent: /tmp if None, and not `tempfile.gettempdir()`: the paths of Ray's sockets must stay under 108 characters.
    """
    if parent is None:
        parent = Path("/tmp") if Path("/tmp").is_dir() else Path(tempfile.gettempdir())
    remove_stale(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        (folder / _OWNER).write_text(json.dumps({"pid": os.getpid(), "machine": machine()}), encoding="utf-8")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_stale(parent: Path) -> None:
    """Remove this user's folders of processes of this machine that have ended; of other machines that is not known here."""
    for owner in parent.glob(f"{_PREFIX}*/{_OWNER}"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            if owner.parent.lstat().st_uid != os.getuid():
                continue
            known = json.loads(owner.read_text(encoding="utf-8"))
            if known["machine"] == machine() and not is_running(int(known["pid"])):
                shutil.rmtree(owner.parent, ignore_errors=True)
