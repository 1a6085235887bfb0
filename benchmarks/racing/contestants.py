"""What takes part: Tatami, its DataParallel, and torch's DistributedDataParallel, fully_shard and pipelining over gloo.

All run the hand-written loop of the README with SGD, from the same weights over the same global batch.
"""

from __future__ import annotations

import contextlib
import copy
import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import tatami
from racing.networks import Network
from tatami.cluster import Cluster
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.model.whole_state import whole_state_dict
from tatami.tiling import Span, spans, whole_shares
from tatami.train import TiledModel, tile
from tatami.workload import WIRES

LEARNING_RATE = 0.05
Weights = dict[str, torch.Tensor]


class CannotError(RuntimeError):
    """A contestant that cannot take part in a cell, and why."""


class AbstractRacer(ABC):
    """One contestant on one rank. Every method is collective.

    Attributes:
        statistics: the samples over which batch normalization takes its statistics, together the whole batch.
    """

    statistics: Sequence[Span]

    @abstractmethod
    def step(self) -> None:
        """One iteration."""

    @abstractmethod
    def weights(self) -> Weights:
        """All parameters by name, on rank 0; anything on the others."""

    def facts(self) -> dict[str, Any]:
        """What its record says beside the times."""
        return {}


def samples_of(weights: Sequence[float], *, samples: int) -> Sequence[Span]:
    """Which samples are each rank's, in proportion."""
    return spans(whole_shares(weights, total=samples))


@final
class Alone(AbstractRacer):
    """The whole network on this rank alone, over some of the samples: what gamma is made of."""

    def __init__(self, network: Network, *, samples: int) -> None:
        self._network = network
        self._model = copy.deepcopy(network.model)
        self._x, self._y = network.x[:samples].clone(), network.y[:samples].clone()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE)

    def step(self) -> None:
        self._optimizer.zero_grad()
        torch.autograd.backward(self._network.loss(self._model(self._x), self._y))
        self._optimizer.step()

    def weights(self) -> Weights:
        return dict(self._model.named_parameters())


@final
class Tatami(AbstractRacer):
    """The layout of least predicted time, from what ranks measured. `-flat`: no stages; `-bfloat16`, `-float16`: the wire."""

    def __init__(self, name: str, network: Network, comm: AbstractCommunicator, *, cluster: Cluster) -> None:
        self._network, samples = network, len(network.x)
        with contextlib.redirect_stdout(io.StringIO()) as told:
            self._model: TiledModel = tile(
                network.model, comm, batch_size=samples, sample=network.x[:2], speeds=cluster, reduction="mean",
                wire=next((wire for wire in WIRES if name.endswith(f"-{wire}")), None), stages=1 if "-flat" in name else None,
                batch_norm="local" if network.batch_norm else "global",
            )  # fmt: skip
        self._told = told.getvalue().strip()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE)
        self.statistics = [replica[0].samples for replica in self._model.tiling.replicas]

    def step(self) -> None:
        model, loss = self._model, self._network.loss
        x, y = model.local(self._network.x, self._network.y)
        self._optimizer.zero_grad()
        for x_part, y_part in model.parts((x, y)):
            torch.autograd.backward(loss(model(x_part), y_part))
        self._optimizer.step()
        model.phases.finish_iteration()

    def weights(self) -> Weights:
        return whole_state_dict(self._model)

    def facts(self) -> dict[str, Any]:
        return {"planned": self._told, "layout": self._model.whole_layout.to_dict()}


@final
class DataParallel(AbstractRacer):
    """`tatami.DataParallel` with weighted shares."""

    def __init__(self, network: Network, comm: AbstractCommunicator, *, speeds: Sequence[float]) -> None:
        self._network, samples = network, len(network.x)
        self.statistics = samples_of(speeds, samples=samples)
        try:
            self._model = tatami.DataParallel(copy.deepcopy(network.model), comm, speeds=speeds)
            self._x, self._y = self._model.local(network.x, network.y)
        except InputError as error:
            raise CannotError(str(error)) from error
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE)

    def step(self) -> None:
        self._optimizer.zero_grad()
        torch.autograd.backward(self._network.loss(self._model(self._x), self._y))
        self._optimizer.step()

    def weights(self) -> Weights:
        return dict(self._model.module.named_parameters())

    def facts(self) -> dict[str, Any]:
        return {"shares": [span.size for span in self.statistics]}


class _Weighted(AbstractRacer):
    """Gradients that torch averages over ranks, of losses scaled so that it is the mean over the samples of unequal batches."""

    _model: nn.Module

    def __init__(self, network: Network, comm: AbstractCommunicator, *, speeds: Sequence[float]) -> None:
        self._network, samples = network, len(network.x)
        self.statistics = samples_of(speeds, samples=samples)
        own = self.statistics[comm.rank]
        # Torch has no rank without samples: it takes one whose gradient counts nothing.
        here = own.slice() if own.size else slice(0, 1)
        self._x, self._y = network.x[here].clone(), network.y[here].clone()
        self._scale = own.size * comm.size / samples

    def step(self) -> None:
        self._optimizer.zero_grad()
        torch.autograd.backward(self._network.loss(self._model(self._x), self._y) * self._scale)
        self._optimizer.step()

    def _optimize(self) -> None:
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE)

    def facts(self) -> dict[str, Any]:
        return {"shares": [span.size for span in self.statistics]}


@final
class Ddp(_Weighted):
    """DistributedDataParallel over gloo, perhaps with float16 on the wire: torch has its bfloat16 hook for NCCL only."""

    def __init__(self, name: str, network: Network, comm: AbstractCommunicator, *, speeds: Sequence[float]) -> None:
        super().__init__(network, comm, speeds=speeds if "weighted" in name else [1.0] * comm.size)
        # All ranks have the same weights already.
        model = nn.parallel.DistributedDataParallel(copy.deepcopy(network.model), init_sync=False)
        self._model: nn.parallel.DistributedDataParallel = model
        if name.endswith("float16"):
            self._model.register_comm_hook(None, fp16_compress_hook)
        self._optimize()

    def weights(self) -> Weights:
        return dict(self._model.module.named_parameters())


@final
class Fsdp(_Weighted):
    """`fully_shard` on every piece and on what is left, over gloo.

    Gathered weights are kept for the backward pass: all of these networks fit, and a gathering takes half as long as a sum.
    """

    def __init__(self, network: Network, comm: AbstractCommunicator, *, speeds: Sequence[float]) -> None:
        super().__init__(network, comm, speeds=speeds)
        model = copy.deepcopy(network.model)
        mesh = init_device_mesh("cpu", (comm.size,))
        try:
            pieces = [piece for piece in network.pieces(model) if any(piece is each for each in model.modules())]
            for part in [*pieces, model]:
                fully_shard(part, mesh=mesh, reshard_after_forward=False)
            assert isinstance(model, FSDPModule)
            model.set_force_sum_reduction_for_comms(True)  # gloo has no mean
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise CannotError(f"fully_shard: {error}") from error
        self._model = model
        self._optimize()

    def weights(self) -> Weights:
        return {name: getattr(each, "full_tensor", lambda own=each: own)() for name, each in self._model.named_parameters()}
