"""The first hour: the wheel in a fresh environment, and the README pasted block by block.

Nothing is downloaded: what Tatami needs is taken from the environment that runs the tests.
"""

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
IN_A_CLONE = "make "


class FreshEnvironment:
    """A virtual environment that has the wheel, and sees the packages of this one but for Tatami itself."""

    def __init__(self, folder: Path) -> None:
        self.programs = folder / "venv" / "bin"
        self.home = folder / "home"
        self.home.mkdir()
        run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")])
        (packages,) = (folder / "venv").glob("lib/python*/site-packages")
        # A line that names a folder: what that folder's own .pth files say, such as where an editable Tatami lies, is not read.
        (packages / "of_the_tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
        for each in (Path(sys.prefix) / "lib").iterdir():  # the MPI library, where its wheel puts it and mpi4py looks for it
            if not each.name.startswith("python"):
                (folder / "venv" / "lib" / each.name).symlink_to(each)
        pip = self.programs / "pip"
        pip.write_text(f'#!/bin/sh\nexec "{self.programs}/python" -m pip "$@"\n', encoding="utf-8")
        pip.chmod(0o755)
        run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")], cwd=ROOT)
        (self.wheel,) = (folder / "dist").glob("*.whl")
        (self.home / "dist").symlink_to(folder / "dist")

    def paste(self, line: str, *, timeout_s: float = 1500) -> str:
        """What a line prints that a user pastes into a shell."""
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("COV")}
        path = os.pathsep.join([str(self.programs), str(Path(sys.executable).parent), environ["PATH"]])
        offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheel.parent), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        return run(["sh", "-ec", line], cwd=self.home, env=environ | offline | {"PATH": path}, timeout_s=timeout_s)


def run(words: Sequence[str], *, cwd: Path | None = None, env: dict[str, str] | None = None, timeout_s: float = 1500) -> str:
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> FreshEnvironment:
    for name in ("pip", "hatchling", "mpi4py", "sklearn"):
        pytest.importorskip(name)
    environment = FreshEnvironment(tmp_path_factory.mktemp("fresh"))
    environment.paste(f"pip install --quiet --no-deps '{environment.wheel}'")
    return environment


@pytest.mark.timeout(1800)
def test_the_readme_runs_as_it_is_pasted(fresh: FreshEnvironment) -> None:
    said = {}
    for language, text in BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8")):
        if language == "python":
            (fresh.home / "program.py").write_text(text, encoding="utf-8")
        for line in text.splitlines() if language == "sh" else ():
            if not line.startswith(IN_A_CLONE):
                said[line] = fresh.paste(line)
    assert any(line.startswith("pip install") for line in said)
    programs = {line: text for line, text in said.items() if line.endswith("program.py")}
    assert len(programs) == 2
    for text in programs.values():
        accuracy = re.search(r"accuracy ([\d.]+)%", text)
        assert accuracy is not None
        assert float(accuracy[1]) > 95
    assert (fresh.home / "model.safetensors").exists()


def test_the_wheel_is_what_runs_and_has_the_examples(fresh: FreshEnvironment) -> None:
    where = fresh.paste("python -c 'import tatami; print(tatami.__file__)'")
    assert Path(where.strip()).is_relative_to(fresh.programs.parent)
    fresh.paste("tatami examples mine")
    for example in (ROOT / "examples").iterdir():
        if example.suffix in (".py", ".toml", ".ipynb"):
            assert (fresh.home / "mine" / example.name).read_bytes() == example.read_bytes()
