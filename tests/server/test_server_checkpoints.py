"""Checkpoints of servers that somebody has edited or damaged: each is named and passed over, none is taken for whole."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import nn

from tatami.checkpoints.files import MANIFEST, describe, seal, unseal
from tatami.errors import CheckpointError
from tatami.server import checkpoints, resume
from tatami.server.learner import signature
from tatami.server.run_settings import RUN_FILE, RunSettings
from tatami.server.saving import Saved

Content = dict[str, Any]
CLOCKS = ((0, 7), (1, 7), (2, 8))


def snapshot(values: list[float]) -> dict[str, Any]:
    vector = np.array(values, dtype=np.float32)
    return {"parameters": vector, "momentum": vector / 2, "count": np.array([7])}


def written(directory: Path) -> Path:
    shards = [snapshot([0.0, 1.0]), snapshot([2.0, 3.0])]
    return checkpoints.write(directory, shards, saved=Saved(version=7, clocks=CLOCKS), terms={"seed": 0})


def swap_clocks(content: Content) -> None:
    content["facts"]["clocks"] = content["facts"]["clocks"][::-1]


def swap_files(content: Content) -> None:
    content["members"].reverse()


def forget_a_file(content: Content) -> None:
    content["members"].pop()


def other_version(content: Content) -> None:
    content["step"] = 6


def other_terms(content: Content) -> None:
    content["facts"]["terms"]["seed"] = 1


@pytest.mark.parametrize("edit", [swap_clocks, swap_files, forget_a_file, other_version, other_terms])
def test_an_edited_manifest_is_not_taken(edit: Callable[[Content], None], tmp_path: Path) -> None:
    manifest = written(tmp_path) / MANIFEST
    assert checkpoints.read(tmp_path).saved == Saved(version=7, clocks=CLOCKS)
    sealed = json.loads(manifest.read_text())
    edit(sealed)
    manifest.write_text(json.dumps(sealed))
    with pytest.raises(CheckpointError, match=r"step-00000007 is damaged: .*manifest.json is damaged: its checksum should be"):
        checkpoints.read(tmp_path)


def replace_shard(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the second shard, checksums and all, as a program with a mistake would write it."""
    file = folder / "shard-0001.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    content = unseal((folder / MANIFEST).read_text())
    content["members"][1] = asdict(describe("shard-0001", file.read_bytes()))
    (folder / MANIFEST).write_text(seal(content))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.update(parameters=np.zeros(2, dtype=np.int8)), "parameters of shard 1 are int8"),
        (lambda tensors: tensors.update(parameters=np.zeros(2, dtype=bool)), "parameters of shard 1 are bool"),
        (lambda tensors: tensors.update(parameters=np.zeros(2)), "parameters of shard 1 are float64.*others are float32"),
        (lambda tensors: tensors.update(parameters=np.zeros((2, 1), np.float32)), r"shape \(2, 1\)"),
        (lambda tensors: tensors.update(momentum=np.zeros(3, np.float32)), r"momentum of shard 1.*shape \(3,\)"),
        (lambda tensors: tensors.update(momentum=np.zeros(2)), "momentum of shard 1 .*float64"),
        (lambda tensors: tensors.update(count=np.array([8])), "shard 1 has taken 8 steps, shard 0 has taken 7"),
        (lambda tensors: tensors.update(count=np.array([7.0])), "count of shard 1"),
        (lambda tensors: tensors.pop("count"), "shard 1 holds momentum, parameters"),
        (lambda tensors: tensors.pop("momentum"), "shard 1 holds count, parameters"),
    ],
)
def test_shards_that_do_not_fit_together_are_not_taken(change: Any, words: str, tmp_path: Path) -> None:
    replace_shard(written(tmp_path), change)
    with pytest.raises(CheckpointError, match=words):
        checkpoints.read(tmp_path)


@pytest.mark.parametrize(
    ("clocks", "words"),
    [
        ([[0, 7], [0, 7]], "worker 0 twice"),
        ([[0, -1]], "-1"),
        ([[0, 7.5]], "7.5"),
        ([[0, True]], "True"),
        ([], "no clocks"),
        ([[0, 7, 1]], r"\[0, 7, 1\]"),
    ],
)
def test_clocks_that_cannot_be_are_not_taken(clocks: Any, words: str, tmp_path: Path) -> None:
    folder = written(tmp_path)
    content = unseal((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(seal(content | {"facts": content["facts"] | {"clocks": clocks}}))
    with pytest.raises(CheckpointError, match=words):
        checkpoints.read(tmp_path)


def test_a_folder_that_was_renamed_is_not_taken(tmp_path: Path) -> None:
    written(tmp_path).rename(tmp_path / "step-00000009")
    with pytest.raises(CheckpointError, match="holds version 7"):
        checkpoints.read(tmp_path)


def test_settings_that_were_edited_are_not_taken(tmp_path: Path) -> None:
    """The longest gradient is in no checkpoint: another one would give other parameters, and no word."""
    RunSettings(rounds=5, clip_norm=0.5).write(tmp_path)
    path = tmp_path / RUN_FILE
    path.write_text(path.read_text().replace('"clip_norm": 0.5', '"clip_norm": 5.0'))
    with pytest.raises(CheckpointError, match=r"run.json is damaged: its checksum should be"):
        RunSettings.read(tmp_path)


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ({"parameters": np.zeros(3, np.float32), "count": np.array([1])}, "3 parameters of float32.*here are 4 of float32"),
        ({"parameters": np.zeros(4), "count": np.array([1])}, "4 parameters of float64.*here are 4 of float32"),
        (
            {"parameters": np.zeros(4, np.float32), "count": np.array([1]), "momentum": np.zeros(4, np.float32)},
            "4 parameters of float32 with count, momentum, parameters; here are 4 of float32 with count, parameters",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_the_model_is_refused(held: Any, words: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    settings = RunSettings(rounds=5, workers=1, servers=1)
    settings.write(tmp_path)
    model = nn.Linear(3, 1)
    optimizer, terms = repr(settings.optimizer), {"samples": 8, "batch_size": settings.batch_size, "seed": settings.seed}
    facts = terms | {"model": signature(model), "optimizer": optimizer}
    checkpoints.write(tmp_path, [held], saved=Saved(version=1, clocks=((0, 1),)), terms=facts)
    with pytest.raises(CheckpointError, match=f"is of another run: it holds {words}"):
        resume(tmp_path, model_fn=lambda: model, loss_fn=nn.MSELoss(), dataset=(torch.zeros(8, 3), torch.zeros(8, 1)))
