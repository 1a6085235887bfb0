"""Data parallelism: every rank has the whole network and its own samples; gradients become those of the global batch.

model = DataParallel(model, comm)
for x, y in batches_of_this_rank:
    optimizer.zero_grad()
    loss(model(x), y).backward()         # when it returns, every rank has the same gradients
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from tatami.cluster import Cluster
from tatami.comm.agreement import debugging, same_everywhere
from tatami.comm.base import AbstractCommunicator, AbstractRequest
from tatami.comm.tuning import tuned_bucket_bytes
from tatami.errors import InputError, TrainingError
from tatami.functions.structure import with_tensors
from tatami.inputs import check_at_least
from tatami.parallel.buckets import BUCKET_BYTES, BucketSet, check_wire, lay_buckets
from tatami.parallel.linear_gradients import LinearGradients
from tatami.parallel.same_steps import StepWatch
from tatami.parallel.speed_shares import SpeedShares
from tatami.parallel.synchronizing import broadcast_model, is_finite, refuse_not_finite


class DataParallel(nn.Module):
    """Stands in for `module`, as torch's DistributedDataParallel does.

    Gradients lie in buckets that are reduced while backward still runs; in a window in the memory of the host where all ranks
    share one. They are those of the loss over the global batch, also where ranks have different numbers of samples: the
    gradient that enters the output of the module is weighed with the rank's share. What the loss adds beside the output, a
    penalty on the weights, is averaged.

    Gradients by the module's inputs have that weight, too. Gradients of gradients (`create_graph=True`) are exact where all
    ranks have equally many samples and the loss is a mean, and refused elsewhere.

    All ranks must call forward, with gradients enabled, and backward equally often. The weights and buffers of rank 0 are
    all ranks' at the start; buffers that forward changes (running statistics) are each rank's own from then on.

    Attributes:
        module: the network itself; its state dict is that of the single-process run.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: AbstractCommunicator,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        speeds: Cluster | Sequence[float] | None = None,
        wire: torch.dtype | None = None,
        double_buffering: bool = False,
        algorithm: str | None = None,
        bucket_bytes: int | None = None,
    ) -> None:
        """Collective.

        Args:
            module: the same on all ranks, except for the values of its weights.
            comm: the ranks.
            reduction: of the loss over samples.
            speeds: of the ranks, in their order; only ratios count. `local` shares batches out by them; None: equally.
            wire: bfloat16 or float16: gradients travel so, half the bytes. They are rounded before and after they are summed.
            double_buffering: backward delivers the gradients of the step before, and reduces its own until the next one ends;
                the first delivers none, so that an optimizer leaves the weights alone. `flush` delivers the last.
            algorithm: of `tatami.comm.AllReduce`, run at the end of backward; None: while it runs.
            bucket_bytes: the largest size of a bucket of several parameters; None: by the tuning table of this cluster
                (`tatami bench allreduce --tune`), 4 MiB where there is none.

        Raises:
            InputError: modules or options that differ between ranks, and where; nothing to train; a `wire` that is not a float;
                not one speed for each rank.
        """
        super().__init__()
        self._shares = SpeedShares([1.0] * comm.size if speeds is None else speeds, comm, where="DataParallel")
        check_wire(wire)
        check_at_least(1, bucket_bytes=bucket_bytes)
        self.module = module
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        self._names = [name for name, _ in named]
        self._parameters_here = [parameter for _, parameter in named]
        self._index_of = {parameter: index for index, parameter in enumerate(self._parameters_here)}
        self._frozen = {name: each for name, each in module.named_parameters() if not each.requires_grad}
        if not named:
            raise InputError("no parameter of this network requires gradients; there is nothing to train")
        self._comm = comm.duplicate()
        self._steps = StepWatch(self._comm, self._parameters_here)
        options = {
            "reduction": reduction,
            "speeds": self._shares.speeds,
            "wire": str(wire),
            "double_buffering": double_buffering,
            "algorithm": algorithm,
            "bucket_bytes": bucket_bytes,
        }
        same_everywhere(comm, options, where="DataParallel")
        broadcast_model(module, comm, where="DataParallel")
        self._reduction = reduction
        bucket_bytes = bucket_bytes or tuned_bucket_bytes(comm) or BUCKET_BYTES
        layouts = lay_buckets(self._parameters_here, bucket_bytes=bucket_bytes)
        shapes = [parameter.shape for parameter in self._parameters_here]
        make = partial(BucketSet, comm, layouts, shapes=shapes, wire=wire, algorithm=algorithm)
        self._sets = [make(), make()] if double_buffering else [make()]
        self._under_way: BucketSet | None = None
        self._num_backwards = 0
        self._synchronizes = True
        self._in_backward = False
        self._debugging = False
        self._not_finite: str | None = None
        for index, parameter in enumerate(self._parameters_here):
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, index))  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own. The first tensor among the arguments tells the number of samples: its first dimension.

        Raises:
            InputError: no such tensor, an output without a tensor that needs gradients, or a frozen parameter that was
                replaced; on all ranks, now and then, optimizers that do not step alike.
            TrainingError: the backward pass before this one was broken off.
        """
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if self._in_backward:
            raise TrainingError(
                f"the last backward pass on rank {self._comm.rank} was broken off, and the ranks no longer agree; end the run"
            )
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise InputError(
                    f"{name} was frozen when DataParallel was made, and its gradient is not summed; make another DataParallel"
                )
        self._steps.begin_pass()
        weight: _Weight | None = None
        if self._reduction == "mean" and self._comm.size > 1:
            weight = _Weight(self._comm, num_samples(args, kwargs))
        enter = partial(self._on_output_gradient, weight)
        entrances: list[torch.Tensor] = []

        def watch(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            # A copy: the module may go on from its own output, and only what comes from outside is to be weighed. A view would
            # lose its hook when the loss changes it in place.
            seen = tensor.clone()
            seen.register_hook(enter)  # type: ignore[no-untyped-call]
            entrances.append(seen)
            return seen

        with LinearGradients(self._place):
            output = self.module(*args, **kwargs)
        output = with_tensors(output, watch)
        if not entrances:
            raise InputError(
                f"the output of {type(self.module).__name__}, {type(output).__name__}, holds no tensor that needs gradients; "
                "return a tensor, or a tuple, list or dict of them"
            )
        return output

    def local(self, *tensors: torch.Tensor) -> Any:
        """This rank's samples of a global batch, as many as it is fast: one tensor for one, a tuple for several.

        The mean of the global batch stays exact: `forward` weighs every rank with the samples that it was given.

        Args:
            tensors: (samples, ...) each; all ranks must pass the same global batch.

        Returns:
            Views (samples_here, ...).

        Raises:
            InputError: tensors of different numbers of samples; a rank that would have none.
        """
        sizes = sorted({tensor.shape[0] for tensor in tensors})
        if len(sizes) != 1:
            raise InputError(f"the tensors of a batch must have the same number of samples, not {sizes}")
        here = self._shares.span(sizes[0]).slice()
        parts = tuple(tensor[here] for tensor in tensors)
        return parts[0] if len(parts) == 1 else parts

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only add to this rank's gradients; the first one after it reduces all of them."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    def flush(self) -> None:
        """With double buffering: deliver the gradients of the last step. Collective."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way.deliver(self._parameters_here)
            self._under_way = None

    def close(self) -> None:
        """Give the buckets back; gradients are gone with them, the module stays. Collective."""
        self.flush()
        for parameter in self._parameters_here:
            parameter.grad = None
        for each in self._sets:
            each.close()
        self._comm.close()

    # -- during backward --------------------------------------------------------------------------------------------

    def _on_output_gradient(self, weight: _Weight | None, grad: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and self._weighs(weight):
            # That is create_graph: what is computed from this gradient would have its weight, and then be weighed once more.
            raise InputError(
                "create_graph=True: DataParallel has gradients of gradients, as for a gradient penalty, only with "
                "reduction='mean' and equally many samples on all ranks"
            )
        self._refuse_captures()
        self._enter_backward()
        share = 1.0 if weight is None else weight()
        if self._reduction == "sum":
            share = float(self._comm.size)
        return grad if share == 1.0 else grad * share

    def _refuse_captures(self) -> None:
        """`torch.autograd.grad` by parameters would return this rank's part of their gradients, which nothing sums.

        Raises:
            InputError: this pass is such a one.
        """
        internals: Any = torch._C
        for name, parameter in zip(self._names, self._parameters_here, strict=True):
            try:
                if internals._will_engine_execute_node(get_gradient_edge(parameter).node):
                    return  # it goes to `.grad`, as nothing does in `torch.autograd.grad`
            except RuntimeError:  # how torch says that this leaf was asked for
                raise InputError(
                    f"torch.autograd.grad was asked for the gradient of {name}, and would return this rank's part of it. Call "
                    "loss.backward(), which sums over the ranks, and read parameter.grad"
                ) from None

    def _weighs(self, weight: _Weight | None) -> bool:
        """Whether any rank weighs the gradient of the output; the same on all ranks."""
        if self._reduction == "sum":
            return self._comm.size > 1
        return weight is not None and not weight.is_alike

    def _place(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Where the gradient may be computed: in its bucket, unless it is to be added to one that is there."""
        index = self._index_of.get(parameter)
        if index is None or not self._synchronizes or parameter.grad is not None:
            return None
        return self._current.place(index)

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        if not self._synchronizes:
            return
        self._enter_backward()
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise InputError(f"the gradient of {self._names[index]} is {parameter.grad.layout}; ranks sum dense gradients only")
        if self._debugging and self._not_finite is None and parameter.grad is not None and not is_finite(parameter.grad):
            self._not_finite = self._names[index]
        if not self._current.store(index, parameter, parameters=self._parameters_here):
            raise TrainingError(
                f"the gradient of {self._names[index]} came twice in one backward pass, the first time not whole; "
                "checkpoint with use_reentrant=False"
            )

    def _enter_backward(self) -> None:
        if self._in_backward or not self._synchronizes:
            return
        self._in_backward = True
        self._debugging, self._not_finite = debugging(), None
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._leave_backward)

    def _leave_backward(self) -> None:
        current, before = self._current, self._under_way
        current.begin_rest(self._parameters_here)
        self._num_backwards += 1
        if len(self._sets) == 1:
            before = current
        else:
            self._under_way = current
            for parameter in self._parameters_here:
                parameter.grad = None
        if before is not None:
            before.wait()
            before.deliver(self._parameters_here)
        self._in_backward = False
        if self._debugging:
            refuse_not_finite(self._comm, self._not_finite, step=self._num_backwards)

    @property
    def _current(self) -> BucketSet:
        return self._sets[self._num_backwards % len(self._sets)]


class _Weight:
    """How much heavier than the mean rank this one weighs: its samples * ranks / all samples; begun in forward."""

    def __init__(self, comm: AbstractCommunicator, samples: int) -> None:
        self._mine = samples
        self._ranks = comm.size
        self._totals = torch.tensor([samples, samples * samples], dtype=torch.int64, device="cpu")
        self._request: AbstractRequest | None = comm.iallreduce(self._totals)

    def __call__(self) -> float:
        total, _ = self._arrived()
        return self._mine * self._ranks / max(1, total)

    @property
    def is_alike(self) -> bool:
        """Whether all ranks have equally many samples; the same on all ranks, where a weight of 1 may be one rank's alone."""
        total, squares = self._arrived()
        return self._ranks * squares == total * total

    def _arrived(self) -> list[int]:
        if self._request is not None:
            self._request.wait()
            self._request = None
        totals: list[int] = self._totals.tolist()
        return totals


def num_samples(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The first dimension of the first tensor.

    Raises:
        InputError: there is none.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.ndim > 0:
            return value.shape[0]
    raise InputError("none of the arguments is a tensor (batch, ...), so the number of samples is not known; pass one directly")
