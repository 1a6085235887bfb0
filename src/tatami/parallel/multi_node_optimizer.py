"""Any optimizer of torch, on many ranks: gradients are averaged over the ranks before each of its steps.

    optimizer = MultiNodeOptimizer(torch.optim.Adam(model.parameters()), comm, model=model)
    for x, y in batches_of_this_rank:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

The model stays what it is. `DataParallel` wraps the model instead, and averages while backward still runs: it is faster, and
knows by itself how many samples each rank had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, overload

import torch
from torch import nn

from tatami.comm.agreement import Watch, debugging, fail_together, same_everywhere
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.gradients.bucketed_sums import BucketedSums
from tatami.gradients.buckets import BUCKET_BYTES, check_wire
from tatami.parallel.batch_norm import MultiNodeBatchNorm
from tatami.parallel.synchronizing import check_finite
from tatami.same_model import broadcast_model, check_same_tensors
from tatami.same_steps import refuse_other_steps, steps_of, watch_steps


class MultiNodeOptimizer(torch.optim.Optimizer):
    """Stands in for `optimizer`, for schedulers too. All ranks must call `step` equally often.

    What is done with gradients between `backward` and `step`, such as clipping, is done before they are averaged: to clip the
    average, call `average_gradients` and step the plain optimizer, or use `DataParallel`. A `GradScaler` is refused.

    The weights of rank 0 are all ranks' from the start, so that the first step counts; so are those of layers that
    `add_param_group` brings later. A gradient that a rank does not have counts as zeros; what no rank has stays None.

    Attributes:
        optimizer: the one that is wrapped.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        comm: AbstractCommunicator,
        *,
        model: nn.Module | None = None,
        weighted: bool = False,
        wire: torch.dtype | None = None,
        double_buffering: bool = False,
        algorithm: str | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Collective.

        Args:
            optimizer: the same on all ranks.
            comm: the ranks.
            model: if given, all of its parameters and buffers are made those of rank 0, and errors name them.
            weighted: `step` is told the samples of each rank, and weighs its gradient by them; otherwise all ranks weigh the
                same, which is the gradient of the global mean only if they have equally many samples.
            wire: bfloat16 or float16: gradients travel so, half the bytes.
            double_buffering: a step applies the gradients of the step before, while its own are averaged: the first applies
                none. `flush` applies the last.
            algorithm: of `tatami.comm.AllReduce`; None: the one of `DataParallel`.
            bucket_bytes: of the vectors that are reduced as one.

        Raises:
            InputError: parameters or options that differ between ranks, and where; a lazy layer that has no shape yet; a `wire`
                that is no float.
        """
        check_wire(wire)
        self.optimizer = optimizer
        options = {
            "optimizer": type(optimizer).__qualname__,
            "weighted": weighted,
            "wire": str(wire),
            "double_buffering": double_buffering,
            "algorithm": algorithm,
            "bucket_bytes": bucket_bytes,
        }
        same_everywhere(comm, options, where="MultiNodeOptimizer")
        self._comm = comm.duplicate()
        self._weighted = weighted
        self._num_steps = 0
        self._names = {} if model is None else {id(each): name for name, each in model.named_parameters()}
        self._has_norms = model is not None and any(isinstance(each, MultiNodeBatchNorm) for each in model.modules())
        self._make_sums = partial(
            BucketedSums,
            self._comm,
            wire=wire,
            is_stale=double_buffering,
            algorithm=algorithm,
            bucket_bytes=bucket_bytes,
            learns=False,
        )
        self._is_stale = double_buffering
        if model is not None:
            broadcast_model(model, self._comm)
        self._groups: list[_Group] = []
        self._parameters: list[nn.Parameter] = []
        watch_steps()
        self._watch = Watch(self._comm)
        self._watch.add(lambda: steps_of(self._parameters), refuse_other_steps)
        self._rebind()
        self._add([each for group in optimizer.param_groups for each in group["params"]])

    @overload
    def step(self, closure: None = None, *, num_samples: int | None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], *, num_samples: int | None = None) -> float: ...

    def step(self, closure: Callable[[], float] | None = None, *, num_samples: int | None = None) -> float | None:
        """Average the gradients, and update. Collective.

        Args:
            closure: as in torch; its loss becomes the mean over the ranks, so that all decide alike on it.
            num_samples: of this rank; with `weighted`, and only then.

        Raises:
            InputError: samples not given, or given in vain; a closure together with double buffering; a sparse gradient; on all
                ranks, now and then, learning rates or other settings that differ.
            NotFiniteError: in debug mode (see `tatami.functions.debug`), a gradient that is NaN or infinite; says where.
            CommTimeoutError, RankDiedError: a rank did not come.
        """
        with fail_together(self._comm):
            if self.__dict__.pop("found_inf", None) is not None:  # GradScaler.step sets it
                raise InputError(
                    "a GradScaler looks for overflows before gradients are averaged, so ranks would leave out different steps. "
                    "Use tatami.DataParallel with the plain optimizer, which averages before; or bfloat16, without a scaler"
                )
            return self._step(closure, num_samples)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """So that a `GradScaler` calls `step` in any case, which refuses it."""
        return self._comm.size > 1

    def _step(self, closure: Callable[[], float] | None, num_samples: int | None) -> float | None:
        if self._weighted != (num_samples is not None):
            raise InputError(f"step: weighted={self._weighted}, but num_samples={num_samples}; give both or none")
        if closure is None:
            self._average(self._weight(num_samples))
            self.optimizer.step()
            return None
        if self._is_stale:
            raise InputError(
                "step: a closure computes gradients for this step, double buffering applies those of the one before"
            )

        def averaged() -> float:
            with torch.enable_grad():
                value: Any = closure()
            loss = torch.tensor([value.item() if isinstance(value, torch.Tensor) else value], dtype=torch.float64, device="cpu")
            weight = self._weight(num_samples)
            self._average(weight)
            loss = loss * weight if weight else torch.zeros_like(loss)
            self._comm.allreduce(loss)
            return loss.item()

        return self.optimizer.step(averaged)

    def flush(self) -> None:
        """With double buffering: apply the gradients of the last step. Collective."""
        for group in self._groups if self._is_stale else ():
            group.clear()
            group.flush()
        if self._is_stale:
            self.optimizer.step()

    def close(self) -> None:
        """Give the buckets back; gradients are gone with them. Collective."""
        for group in self._groups:
            group.close()
        self._comm.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the parameters of a new layer; they become those of rank 0, and are in the next step. Collective."""
        self.optimizer.add_param_group(param_group)
        self._add(self.optimizer.param_groups[-1]["params"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of the wrapped optimizer."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """State of the wrapped optimizer, which the plain one loads."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """What the plain or the wrapped optimizer saved."""
        self.optimizer.load_state_dict(dict(state_dict))
        self._rebind()

    def __getattr__(self, name: str) -> Any:
        """What is not here is the wrapped optimizer's: its own settings, and the hooks of torch."""
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"MultiNodeOptimizer({self.optimizer!r})"

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _rebind(self) -> None:
        """The same objects as those of the wrapped optimizer: schedulers write to them."""
        self.defaults = self.optimizer.defaults
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state

    def _add(self, parameters: Sequence[nn.Parameter]) -> None:
        known = len(self._parameters)
        names = [self._names.get(id(each), f"parameter {number}") for number, each in enumerate(parameters, start=known)]
        check_same_tensors(self._comm, dict(zip(names, parameters, strict=True)), where="MultiNodeOptimizer")
        for each in parameters:
            self._comm.bcast(each)
        self._parameters.extend(parameters)
        self._groups.append(_Group(names, parameters, sums=self._make_sums()))

    def _weight(self, num_samples: int | None) -> float:
        """The share of this rank in the mean over all."""
        if num_samples is None:
            return 1 / self._comm.size
        sums = torch.tensor([num_samples, num_samples**2], dtype=torch.int64, device="cpu")
        self._comm.allreduce(sums)
        total, squares = map(int, sums.tolist())
        if self._has_norms and self._comm.size * squares != total * total:
            raise InputError(
                "the ranks have different numbers of samples, and a MultiNodeBatchNorm has weighed their losses as equal, so "
                "gradients would be wrong. Use tatami.DataParallel, which tells it the shares"
            )
        return num_samples / max(1, total)

    def _average(self, weight: float) -> None:
        self._num_steps += 1
        self._watch.begin_pass()
        if debugging():
            names = [name for group in self._groups for name in group.names]
            check_finite(self._comm, names, [each for group in self._groups for each in group.parameters], step=self._num_steps)
        for group in self._groups:
            group.average(weight)


class _Group:
    """Parameters that were added together, and the sums of their gradients."""

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter], *, sums: BucketedSums) -> None:
        self.names, self.parameters, self._sums = list(names), list(parameters), sums
        sums.begin(self.parameters)

    def average(self, weight: float) -> None:
        """This rank's gradients are there; those that are due become those of the parameters."""
        gradients = [parameter.grad for parameter in self.parameters]
        for name, gradient in zip(self.names, gradients, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise InputError(f"the gradient of {name} is {gradient.layout}; ranks sum dense ones only")
        if not weight:  # the mean over no samples is not a number
            gradients = [None] * len(gradients)
        sums = self._sums.finish(self.parameters, gradients, weight=weight, samples=0)
        for parameter, total in zip(self.parameters, sums, strict=True):
            parameter.grad = total

    def flush(self) -> None:
        for parameter, total in self._sums.flush():
            parameter.grad = total

    def close(self) -> None:
        self._sums.flush()
        self.clear()
        self._sums.close()

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
