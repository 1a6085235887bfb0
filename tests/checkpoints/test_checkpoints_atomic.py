"""Everything that writes a file for its user does it in one step, through `tatami.outputs`."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import tatami
from tatami.checkpoints import MultiNodeCheckpoint
from tatami.checkpoints.files import Manifest, write_manifest
from tatami.checkpoints.tensors import write_tensors
from tatami.cluster import Cluster, write_cluster
from tatami.comm import AbstractCommunicator, run_threads
from tatami.report import blank, save
from tatami.report.server_run import RunReport
from tatami.server import RunSettings, checkpoints
from tatami.server.saving import Saved

SOURCE = Path(tatami.__file__).parent


def _multi_node(folder: Path) -> None:
    def body(comm: AbstractCommunicator) -> None:
        checkpoint = MultiNodeCheckpoint(folder, comm)
        checkpoint.save(1, {"weights": torch.ones(2)})
        checkpoint.close()

    run_threads(body, size=2)


def _picture(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    figure, _ = blank()
    save(figure, folder / "mats.png", force=True)


SAVERS: dict[str, Callable[[Path], object]] = {
    "weights": lambda folder: write_tensors(folder / "w.safetensors", {"w": torch.ones(2)}, force=True),
    "manifest": lambda folder: write_manifest(folder, Manifest(step=1, ranks=1, members=())),
    "multi-node checkpoint": _multi_node,
    "server's checkpoint": lambda folder: checkpoints.write(
        folder, [{"w": np.ones(2, np.float32)}], saved=Saved(version=3, clocks=((0, 1),)), terms={}
    ),
    "server's settings": lambda folder: RunSettings(rounds=1).write(folder),
    "server's report": lambda folder: RunReport(recovery="ignore").save(folder / "run.json", force=True),
    "cluster": lambda folder: write_cluster(Cluster.from_speeds([1.0]), folder / "cluster.toml", force=True),
    "picture": _picture,
}


@pytest.fixture(params=SAVERS)
def saver(request: pytest.FixtureRequest) -> Iterator[Callable[[Path], object]]:
    before = os.umask(0o027)
    yield SAVERS[request.param]
    os.umask(before)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_what_is_saved_obeys_the_umask(saver: Callable[[Path], object], tmp_path: Path) -> None:
    saver(tmp_path)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files(tmp_path)} == {
        path.name: "0o640" for path in files(tmp_path)
    }
    assert files(tmp_path)


def test_every_byte_is_synced(saver: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = set(), os.fsync

    def noted(handle: int) -> None:
        synced.add((os.fstat(handle).st_ino, os.fstat(handle).st_size))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    saver(tmp_path)
    assert {(path.stat().st_ino, path.stat().st_size) for path in files(tmp_path)} <= synced


def test_an_interrupted_save_is_cleaned_up_by_the_next(saver: Callable[[Path], object], tmp_path: Path) -> None:
    saver(tmp_path)
    whole = {path: path.read_bytes() for path in files(tmp_path)}
    for folder in {path.parent for path in whole}:
        (folder / ".tatami-0123456789abcdef.part").write_bytes(b"half")  # of a process that was killed
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002" / "shard-0000.safetensors").write_bytes(b"half")
    saver(tmp_path)
    left = [path.name for path in files(tmp_path) if path not in whole and path.parent.name != "step-00000002"]
    assert left == []
    if saver is SAVERS["server's checkpoint"]:
        assert not (tmp_path / "step-00000002").exists()


def test_nothing_else_in_the_package_replaces_files() -> None:
    own = re.compile(r"os\.replace\(|os\.rename\(|mkstemp\(|NamedTemporaryFile\(|save_file\(|savefig\(|torch\.save\(")
    found = {
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in SOURCE.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if own.search(line) and path != SOURCE / "outputs.py" and "`" not in line  # what users call is named in docstrings
    }
    assert found == {
        # Into the part that `replacing` has made.
        'report/picture.py: figure.savefig(part, dpi=150, format=path.suffix.lower().removeprefix("."))',
        # Where the ranks of a benchmark find each other; it is not kept.
        'bench/interleaved.py: handle, place = tempfile.mkstemp(prefix="tatami-store-")',
        # The token of a user's ranks under torchrun, which only its owner may read.
        "comm/job_token.py: with tempfile.NamedTemporaryFile(dir=folder) as part:  # only its owner can read it",
    }
