"""What is started in a lab finds the packages of the benchmarks, wherever it is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elsewhere import HERE, of_ranks, python_path

MODULES = ("paper.rank", "paper.measuring", "rehearsal.rank", "rehearsal.server")


def test_another_process_finds_the_packages_from_any_folder(tmp_path: Path) -> None:
    code = f"import {', '.join(MODULES)}; print(paper.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **python_path()},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == HERE / "paper" / "__init__.py"


def test_a_path_that_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    assert python_path() == {"PYTHONPATH": f"{HERE}{os.pathsep}/of/the/user"}
    monkeypatch.delenv("PYTHONPATH")
    assert python_path() == {"PYTHONPATH": str(HERE)}


def test_ranks_load_what_is_slow_before_their_quotas() -> None:
    assert of_ranks()["TATAMI_LAB_PRELOAD"].startswith("torch._dynamo,")
    assert of_ranks(preload=["paper.measuring"])["TATAMI_LAB_PRELOAD"].endswith(",paper.measuring")
