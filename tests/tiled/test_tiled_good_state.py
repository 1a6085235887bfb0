"""Which state is put back where a loss stops being finite, and that keeping it costs a step next to nothing."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from equal_runs import in_batches, plain_fit
from networks import CASES, build
from safetensors.torch import load_file
from torch import nn

from tatami.comm import AbstractCommunicator, init
from tatami.errors import NotFiniteError
from tatami.retiling import Controller, Decision, DecisionKind, Retiler
from tatami.state.good_state import FIRST, MOST_APART, GoodState
from tatami.train import Trainer, move, tile, whole_state_dict
from tiled_rig import assert_close, optimizers, simple_layout, some_layouts, tiled

pytestmark = pytest.mark.ranks(1, 3)

ADAM = optimizers(torch.float64)["adam"]
BAD = 28
"""The iteration whose batch has a sample that is NaN."""
FEW, MANY = 4, 4096
"""Samples of a batch: fewer than the weights that a state has, and so many that copying those is nothing beside them."""


def network() -> nn.Module:
    layers = nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5)
    generator = torch.Generator().manual_seed(2)
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.5)
    return model


def poisoned(batch_size: int, *, bad: int = BAD) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(bad * batch_size, 4, generator=generator, dtype=torch.float64)
    y = torch.rand(bad * batch_size, 5, generator=generator, dtype=torch.float64)
    x[-1] = float("nan")
    return x, y


def mse(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def plain_after(steps: int, batch_size: int, *, bad: int = BAD) -> dict[str, torch.Tensor]:
    x, y = poisoned(batch_size, bad=bad)
    batches = in_batches(batch_size, x, y)[:steps]
    return plain_fit(network(), batches, loss=mse, optimizer=ADAM)[1]


class Relaid:
    """A callback that lays the tiles elsewhere after an iteration."""

    def __init__(self, after: int) -> None:
        self._after = after

    def on_train_batch_end(self, trainer: Trainer, loss: float) -> None:  # noqa: ARG002 -- of the Trainer's hooks
        if trainer.iteration == self._after:
            model = trainer.model
            move(model, simple_layout(list(range(model.comm.size))), optimizer=trainer.optimizer)


@pytest.mark.parametrize(
    ("batch_size", "relaid_after", "kept", "sharded"),
    [
        (MANY, None, BAD - 2, False),  # that with which the last finite loss was computed
        (FEW, None, BAD // MOST_APART * MOST_APART - 1, False),
        (FEW, None, BAD // MOST_APART * MOST_APART - 1, True),
        (FEW, 24, 24, False),  # what was kept does not fit any more
    ],
)
def test_the_state_that_is_put_back(
    comm: AbstractCommunicator, tmp_path: Path, batch_size: int, relaid_after: int | None, kept: int, sharded: bool
) -> None:
    assert BAD > FIRST + MOST_APART
    built, expected = network(), plain_after(kept, batch_size)
    layout = some_layouts(comm.size)[1 if sharded and comm.size > 1 else -1]
    model = tiled(built, comm, layout=layout, batch_size=batch_size, sharded_optimizer=sharded)
    callbacks = [] if relaid_after is None else [Relaid(relaid_after)]
    trainer = Trainer(model, optimizer=ADAM, loss=nn.MSELoss(), rescue_dir=tmp_path, callbacks=callbacks)
    with pytest.raises(NotFiniteError, match=f"in iteration {BAD}; .* that was kept, after iteration {kept}, "):
        trainer.fit(poisoned(batch_size), batch_size=batch_size, epochs=1, shuffle=False)
    assert_close(load_file(tmp_path / f"last-good-{kept:06d}.safetensors"), expected, what="saved")
    assert_close(comm.bcast_object(whole_state_dict(model)), expected, what="in the model")


def test_a_run_begins_with_a_state_of_its_own(comm: AbstractCommunicator, tmp_path: Path) -> None:
    """Other weights were loaded between two runs: those of the first are not what the second goes back to."""
    built = network()
    x, y = poisoned(FEW)
    model = tiled(built, comm, layout=some_layouts(comm.size)[-1], batch_size=FEW)
    trainer = Trainer(model, optimizer=ADAM, loss=nn.MSELoss(), rescue_dir=tmp_path)
    trainer.fit((x[: 15 * FEW], y[: 15 * FEW]), batch_size=FEW, epochs=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    with pytest.raises(NotFiniteError, match="in iteration 17; the last good state that was kept, after iteration 15, "):
        trainer.fit((x[-2 * FEW :], y[-2 * FEW :]), batch_size=FEW, epochs=1, shuffle=False)
    assert all(bool((each == 0.25).all()) for each in model.parameters())


@pytest.mark.ranks(2)
def test_split_buffers_move_along_in_a_re_tiling(comm: AbstractCommunicator, tmp_path: Path) -> None:
    """Of a batch normalization between two convolutions, each rank of a replica has the statistics of its channels."""
    case = CASES["mobile"]
    built = build(case)
    sample = case.draw(4, torch.Generator().manual_seed(0))
    layouts = some_layouts(comm.size)
    model = tile(built, comm, batch_size=4, sample=sample, speeds="equal", layout=layouts[0], reduction="mean", quiet=True)
    good = GoodState(model, folder=tmp_path)
    good.keep(3)
    for layout in layouts[1:]:
        with torch.no_grad():
            for tensor in model.module.state_dict().values():
                tensor.fill_(7)
        move(model, layout, optimizer=None, companions=good.companions())
        good.moved()
    assert "after iteration 3" in good.rescue()
    whole = comm.bcast_object(whole_state_dict(model))
    assert all(torch.equal(whole[name], value) for name, value in built.state_dict().items())


@pytest.mark.ranks(1, 2)
def test_frozen_weights_are_not_copied_until_they_are_trained(comm: AbstractCommunicator, tmp_path: Path) -> None:
    """Under LoRA a copy of them would be as large as the network, and no update changes them."""
    built = network()
    built.get_submodule("0").requires_grad_(False)
    model = tiled(built, comm, layout=some_layouts(comm.size)[0], batch_size=MANY)
    good = GoodState(model, folder=tmp_path)
    good.keep(1)
    assert [each.requires_grad for each in good.companions()] == [True, True]
    move(model, some_layouts(comm.size)[-1], optimizer=None, companions=good.companions())
    good.moved()
    good.keep(2)
    assert len(good.companions()) == 2
    model.module.requires_grad_(True)
    good.keep(3)
    assert len(good.companions()) == 4
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    assert "after iteration 3" in good.rescue()
    assert_close(comm.bcast_object(whole_state_dict(model)), dict(built.state_dict()), what="in the model")


class Shifted(nn.Module):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("scratch", torch.zeros(1, dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.mean


@pytest.mark.ranks(1)
def test_of_a_buffer_the_tensor_that_is_there_now_is_kept_and_put_back(comm: AbstractCommunicator, tmp_path: Path) -> None:
    model = tile(nn.Sequential(Shifted(), network()), comm, batch_size=3, speeds="equal", reduction="mean", quiet=True)
    good = GoodState(model, folder=tmp_path)
    held: dict[str, Any] = model.module.get_submodule("0")._buffers
    for iteration in range(3):
        held["mean"] = torch.full((4,), float(iteration), dtype=torch.float64)  # as modules do that keep a running mean
        good.keep(iteration)
    held["mean"], held["scratch"] = (torch.full((size,), float("nan"), dtype=torch.float64) for size in (4, 1))
    assert "after iteration 2" in good.rescue()
    assert held["mean"].tolist() == [2.0] * 4
    assert held["scratch"].isnan()  # no part of the state


def test_one_rank_alone_computes_what_the_plain_loop_does_and_nothing_else() -> None:
    """Bit for bit, and with no hook and no node of Tatami's in the graph: what a step costs more is a few calls of Python."""
    plain = nn.Sequential(network(), nn.BatchNorm1d(5).double())
    x, y = (each[:FEW] for each in poisoned(FEW))
    model = tile(plain, init(backend="single"), batch_size=FEW, speeds="equal", reduction="mean", quiet=True)
    history = Trainer(model, optimizer=ADAM, loss=nn.MSELoss()).fit((x, y), batch_size=FEW, epochs=3)
    losses, state = plain_fit(plain, [(x, y)] * 3, loss=mse, optimizer=ADAM)
    assert history.losses == losses
    assert all(torch.equal(model.module.state_dict()[key], value) for key, value in state.items())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert _nodes(model(x)) == _nodes(plain(x))


def _nodes(output: torch.Tensor) -> list[str]:
    """The names of what leads back from `output`."""
    found: list[str] = []
    todo: list[Any] = [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None:
            found.append(node.name())
            todo += [each for each, _ in node.next_functions]
    return sorted(found)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("retiled_after", [None, 1, 2])
def test_the_last_good_state_is_saved_before_the_error(
    comm: AbstractCommunicator, tmp_path: Path, retiled_after: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of iteration 2 was finite, so the parameters that it was computed with, those after iteration 1, are good."""
    built = network()
    expected = plain_after(1, FEW, bad=3)
    if retiled_after:
        monkeypatch.setattr(Controller, "observe", partial(_retile_once, retiled_after, simple_layout(list(range(comm.size)))))
    layouts = some_layouts(comm.size)
    model = tiled(built, comm, layout=layouts[-1], batch_size=FEW)
    trainer = Trainer(
        model, optimizer=ADAM, loss=nn.MSELoss(), rescue_dir=tmp_path, retile=Retiler(every=1) if retiled_after else None
    )
    with pytest.raises(NotFiniteError) as caught:
        trainer.fit(poisoned(FEW, bad=3), batch_size=FEW, epochs=2, shuffle=False)
    tiling = model.layout.cut(samples=FEW, units=7)
    holder = next(tile for tile in tiling.tiles if tile.samples.start <= FEW - 1 < tile.samples.stop)
    replica = [int(tile.processor[1:]) for tile in tiling.replicas[holder.replica]]
    assert (caught.value.rank, caught.value.iteration) == (min(replica), 3)
    path = tmp_path / "last-good-000001.safetensors"
    assert f"the loss is nan on rank {min(replica)} of {comm.size}" in str(caught.value)
    assert f"after iteration 1, is in {path} and in the model" in str(caught.value)
    assert_close(load_file(path), expected, what="saved")
    assert_close(comm.bcast_object(whole_state_dict(model)), expected, what="in the model")


def _retile_once(after: int, layout: Any, iteration: int, timings: Any) -> Decision:
    """A controller that lays the tiles anew after one iteration."""
    return Decision(
        kind=DecisionKind.WHOLE if iteration == after else DecisionKind.KEEP,
        iteration=iteration,
        layout=layout,
        speeds={},
        ratio=None,
        predicted=1.0,
        reason=f"the test says so ({len(list(timings))} timings)",
    )


@pytest.mark.ranks(1, 2, 3, 4)
def test_a_loss_that_is_bad_from_the_start_says_that_nothing_could_be_saved(comm: AbstractCommunicator, tmp_path: Path) -> None:
    built = network()
    x, y = poisoned(FEW, bad=3)
    trainer = Trainer(
        tiled(built, comm, layout=some_layouts(comm.size)[0], batch_size=3 * FEW),
        optimizer=ADAM,
        loss=nn.MSELoss(),
        rescue_dir=tmp_path,
    )
    with pytest.raises(NotFiniteError, match=r"in iteration 1; there was no good state yet to save.*gradient_clip_val"):
        trainer.fit((x, y), batch_size=3 * FEW, epochs=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks(1, 2, 3, 4)
def test_what_an_earlier_run_rescued_is_not_written_over(comm: AbstractCommunicator, tmp_path: Path) -> None:
    built = network()
    plain_after_1 = plain_after(1, FEW, bad=3)
    earlier = tmp_path / "last-good-000001.safetensors"
    if comm.rank == 0:
        earlier.write_bytes(b"of an earlier run")
    comm.barrier()
    model = tiled(built, comm, layout=some_layouts(comm.size)[-1], batch_size=FEW)
    trainer = Trainer(model, optimizer=ADAM, loss=nn.MSELoss(), rescue_dir=tmp_path)
    with pytest.raises(NotFiniteError, match=r"is in \S*last-good-000001-1\.safetensors and in the model"):
        trainer.fit(poisoned(FEW, bad=3), batch_size=FEW, epochs=2, shuffle=False)
    assert earlier.read_bytes() == b"of an earlier run"
    assert_close(load_file(tmp_path / "last-good-000001-1.safetensors"), plain_after_1, what="saved")
