"""Data parallelism: every rank has the whole network and its own samples; gradients become those of the global batch.

model = DataParallel(model, comm)
for x, y in batches_of_this_rank:
    optimizer.zero_grad()
    loss(model(x), y).backward()         # when it returns, every rank has the same gradients
    optimizer.step()
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal, Never

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from tatami.batch import cut_batch, samples_of
from tatami.cluster import Cluster
from tatami.comm.agreement import Watch, fail_together, same_everywhere
from tatami.comm.base import AbstractCommunicator, AbstractRequest
from tatami.errors import InputError, ModelError, TatamiError, warn
from tatami.functions.structure import with_tensors
from tatami.gradients.base import refuse_counted_rows
from tatami.gradients.bucketed_sums import BucketedSums
from tatami.gradients.buckets import check_wire, usual_bucket_bytes
from tatami.gradients.engine import GradientEngine
from tatami.gradients.loss_factors import Constant, refuse_other_factors
from tatami.gradients.outside_reads import OutsideReads
from tatami.gradients.passes import ForwardPass, over_batch, refuse_compiling, refuse_transforms
from tatami.inputs import check_at_least
from tatami.parallel.batch_norm import MultiNodeBatchNorm
from tatami.parallel.speed_shares import SpeedShares
from tatami.parallel.synchronizing import is_finite, refuse_not_finite
from tatami.same_model import broadcast_model
from tatami.same_steps import refuse_other_steps, steps_of, watch_steps
from tatami.same_weights import Numbers, numbers_of, refuse_other_weights

_ROWS = "rows of an output for each row of the first tensor of the model's input, which are taken for the samples:"
_engines: weakref.WeakValueDictionary[nn.Module, GradientEngine] = weakref.WeakValueDictionary()


class DataParallel(nn.Module):
    """Stands in for `module`, as torch's DistributedDataParallel does.

    Gradients are those of the loss over the global batch, also where ranks have different numbers of samples: each rank's loss
    is that of its own samples, and the gradients of the parameters are weighed with the rank's share (`tatami.gradients`). So
    the output may go into another model, hooks may catch activations for the loss, and backward may be called as often as one
    likes. They lie in buckets that are reduced while backward still runs; in a window in the memory of the host where all
    ranks share one.

    A mean that is not over samples is refused where the graph of the loss shows it (a root, a masked mean, a cross-entropy with
    class weights or targets of -100); `over_batch` makes it exact. So are losses that take samples with each other, as far as
    the graph shows it (a contrastive loss, a distance to the mean).

    Gradients by the module's inputs are those of the rank's own loss. Gradients of gradients (`create_graph=True`) by inputs
    are exact; those by parameters are refused. A penalty on the weights is exact where the loss is a mean, and refused where it
    is a sum, to which every rank would add it.

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
                (`tatami bench allreduce --tune`); where there is none, 4 MiB, or an eighth of the gradients between hosts.

        Raises:
            InputError: modules or options that differ between ranks, and where; nothing to train; a `wire` that is not a float;
                not one speed for each rank; a module that is in another DataParallel.
            ModelError: an embedding with `scale_grad_by_freq`; a SyncBatchNorm that would not synchronize.
        """
        super().__init__()
        self._shares = SpeedShares([1.0] * comm.size if speeds is None else speeds, comm, where="DataParallel")
        check_wire(wire)
        check_at_least(1, bucket_bytes=bucket_bytes)
        before = _engines.get(module)
        if before is not None and not before.is_closed:
            raise InputError(
                "this network is in another DataParallel, which would sum its gradients as well. Call close() on that one first"
            )
        self.module = module
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not trained:
            raise InputError("no parameter of this network requires gradients; there is nothing to train")
        for name, layer in module.named_modules():
            refuse_counted_rows(name, layer)
            if isinstance(layer, nn.SyncBatchNorm) and comm.size > 1 and not torch.distributed.is_initialized():
                raise ModelError(
                    f"{name or 'the network'} is a SyncBatchNorm, which takes statistics of this rank's samples alone where "
                    "torch.distributed has no process group: wrap tatami.parallel.create_mnbn_model(network, comm)"
                )
        self._comm = comm.duplicate()
        watch_steps()
        self._num_looks, self._warns_of_buffers = 0, comm.rank == 0
        self._watch = Watch(self._comm)
        self._watch.add(lambda: steps_of(trained), refuse_other_steps)
        self._watch.add(self._weights, refuse_other_weights)
        self._watch.add(self._kept, self._warn_of_buffers)
        self._watch.add(lambda: self._outside.facts, refuse_other_factors)
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
        self._sums = BucketedSums(
            self._comm,
            bucket_bytes=bucket_bytes or usual_bucket_bytes(comm, trained),
            wire=wire,
            algorithm=algorithm,
            is_stale=double_buffering,
            check=partial(_check, self._comm, {parameter: name for name, parameter in module.named_parameters()}),
        )
        self._sums.begin(trained)
        self._outside = OutsideReads(
            module,
            cut=(),
            replicas=list,  # none shares units
            warns=False,
            comm=self._comm,
        )
        self._engine = _engines[module] = GradientEngine(module, sums=self._sums, outside=self._outside, comm=self._comm)
        self._begun: ForwardPass | None = None
        self._norms = [each for each in module.modules() if isinstance(each, MultiNodeBatchNorm)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own. The first tensor among the arguments tells the number of samples: its first dimension.

        Raises:
            ModelError: this runs under `torch.compile`.
            InputError: no such tensor, or an output without a tensor that needs gradients; on all ranks, now and then,
                optimizers that do not step alike.
            TrainingError: the backward pass before this one was broken off.
        """
        if self._comm.size > 1:
            refuse_compiling()
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        with fail_together(self._comm, only=TatamiError):
            return self._forward(args, kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        size, is_mean = self._comm.size, self._reduction == "mean"
        refuse_transforms()
        self._watch.begin_pass()
        self._outside.num_passes += 1
        samples = num_samples(args, kwargs) if is_mean and size > 1 else 0
        self._outside.samples = self._judged(samples, args, kwargs)
        begun = self._begun = self._engine.begin(
            samples=samples,
            shares=_Shares(self._comm, samples) if is_mean and size > 1 else lambda: (1.0,) * size,
            index=self._comm.rank,
            adds_terms=not is_mean and size > 1,
        )
        for norm in self._norms:
            norm.loss_weight = begun.weight
        output = self._engine.outputs(begun, self.module(*args, **kwargs), reduction=self._reduction)
        need_gradients, shapes = set[bool](), list[torch.Size]()

        def look(tensor: torch.Tensor) -> torch.Tensor:
            need_gradients.add(tensor.requires_grad)
            shapes.extend([tensor.shape] if tensor.numel() > 1 else [])
            return tensor

        with_tensors(output, look)
        if True not in need_gradients:
            raise InputError(
                f"the output of {type(self.module).__name__}, {type(output).__name__}, holds no tensor that needs gradients; "
                "return a tensor, or a tuple, list or dict of them"
            )
        has_samples = samples < 2 or any(samples in shape or shape[0] % samples == 0 for shape in shapes)
        rows = 0.0 if has_samples or not shapes else shapes[0][0] / samples
        self._outside.rows = (Constant(_ROWS, rows, rows),) if rows else ()
        return output

    def _judged(self, samples: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """`OutsideReads.samples`, with so many `samples` of a mean."""
        if self._reduction == "mean" or self._comm.size == 1:
            return samples if samples > 1 else None
        with suppress(InputError):  # a sum need not know how many there are
            return 0 if num_samples(args, kwargs) > 1 else None
        return None

    def local(self, *batch: Any) -> Any:
        """This rank's samples of a global batch, as many as it is fast: one part for one, a tuple for several.

        The mean of the global batch stays exact: `forward` weighs every rank with the samples that it was given.

        Args:
            batch: tensors (samples, ...), or tuples, lists and dicts of them; all ranks must pass the same global batch.

        Returns:
            Views (samples_here, ...), in the same structure.

        Raises:
            InputError: tensors of different numbers of samples, or what cannot be cut into samples; a rank that would
                have none.
        """
        whole = batch[0] if len(batch) == 1 else batch
        samples = samples_of(whole)
        return cut_batch(whole, self._shares.span(samples), samples=samples)

    def over_batch(self, mean: torch.Tensor) -> torch.Tensor:
        """The mean over the global batch, where `mean` is that over this rank's samples. Collective; gradients flow through it.

            loss = model.over_batch(F.mse_loss(model(x), y)).sqrt()

        Args:
            mean: of any shape, the same on all ranks; of the samples of the last forward pass with gradients.

        Raises:
            InputError: the loss is a sum, or there was no such pass.
        """
        if self._reduction != "mean" or self._begun is None:
            raise InputError("model.over_batch is for losses that are a mean, after a forward pass with gradients")
        return over_batch(mean, share=self._begun.share, comm=self._comm)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only add to this rank's gradients; the first one after it reduces all of them."""
        with self._engine.deferring():
            yield

    def flush(self) -> None:
        """With double buffering: deliver the gradients of the last step. Collective."""
        for parameter, total in self._sums.flush():
            parameter.grad = total

    def close(self) -> None:
        """Give the buckets back; gradients are gone with them, the module stays. Collective."""
        self.flush()
        for parameter in self._engine.parameters:
            parameter.grad = None
        self._engine.close()
        self._sums.close()
        self._comm.close()

    def __reduce_ex__(self, protocol: Any) -> Never:
        """Called by `copy.deepcopy`, `pickle` and `torch.save`."""
        raise ModelError(
            "a DataParallel holds its ranks' communicator, and cannot be copied or pickled. Copy, save or average the network "
            "itself, model.module, which has all weights: AveragedModel(model.module)"
        )

    def _weights(self) -> dict[str, Numbers]:
        self._num_looks += 1
        return numbers_of(self.module.named_parameters(), look=self._num_looks)

    def _kept(self) -> dict[str, Numbers]:
        """Buffers, but for running statistics that layers of torch keep for evaluation."""
        modules = [(name, each) for name, each in self.module.named_modules() if not isinstance(each, _NormBase)]
        named = [(f"{name}.{own}".lstrip("."), each) for name, module in modules for own, each in module._buffers.items()]
        return numbers_of([(name, each) for name, each in named if each is not None], look=self._num_looks)

    def _warn_of_buffers(self, every_rank: Sequence[Mapping[str, Numbers]]) -> None:
        try:
            refuse_other_weights(every_rank)
        except InputError as error:
            if self._warns_of_buffers:
                self._warns_of_buffers = False
                warn(
                    f"the buffer {str(error).partition(' Since')[0]} The forward pass changes it by a rank's own samples (a "
                    "running mean, a codebook), so what is computed with it is not what one machine computes. Change it "
                    "between two steps, by numbers that all ranks share"
                )


class _Shares:
    """Each rank's share of all samples; the exchange begins in forward."""

    def __init__(self, comm: AbstractCommunicator, samples: int) -> None:
        self._counts = torch.zeros(comm.size, dtype=torch.int64, device="cpu")
        self._counts[comm.rank] = samples
        self._request: AbstractRequest = comm.iallreduce(self._counts)

    def __call__(self) -> tuple[float, ...]:
        self._request.wait()
        counts: list[int] = self._counts.tolist()
        return tuple(count / max(1, sum(counts)) for count in counts)


def _check(
    comm: AbstractCommunicator,
    names: Mapping[nn.Parameter, str],
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[torch.Tensor | None],
) -> None:
    pairs = zip(parameters, gradients, strict=True)
    bad = next((names.get(each, "a parameter") for each, grad in pairs if grad is not None and not is_finite(grad)), None)
    refuse_not_finite(comm, bad, step=None)


def num_samples(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The first dimension of the first tensor.

    Raises:
        InputError: there is none.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.ndim > 0:
            return value.shape[0]
    raise InputError("none of the arguments is a tensor (batch, ...), so the number of samples is not known; pass one directly")
