"""Files that MPICH left in shared memory: which are removed, and which belong to somebody."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import pytest

from tatami.comm import leftovers
from tatami.comm.leftovers import without_leftovers


def test_only_new_files_that_nobody_has_mapped_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path)
    names = {name: tmp_path / name for name in ("mpich_shm_1_0", "mpich_shm_2_0", "mpich_shm_3_0", "plasma")}
    old, left, live, other = names.values()
    old.touch()
    os.utime(old, (time.time() - 60,) * 2)
    with without_leftovers():
        for path in (left, live, other):
            path.write_bytes(bytes(mmap.PAGESIZE))
        file = live.open("r+b")
        memory = mmap.mmap(file.fileno(), 0)
        file.close()
    assert {path for path in names.values() if path.exists()} == {old, live, other}
    memory.close()


def test_they_are_removed_where_the_job_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path)

    def job() -> None:
        (tmp_path / "mpich_shm_4_0").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), without_leftovers():
        job()
    assert not list(tmp_path.iterdir())
