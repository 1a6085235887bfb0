"""Averages over the ranks: of gradients, and of running statistics."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import nn

from tatami.comm.agreement import debugging, problems_of
from tatami.comm.allreduce import AUTO, tuned_allreduce
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError, NotFiniteError
from tatami.same_model import refuse_lazy


def average_gradients(model: nn.Module, comm: AbstractCommunicator, *, algorithm: str = AUTO) -> None:
    """Every gradient becomes the mean over the ranks, in place. Collective.

    A rank without a gradient that another has counts with zeros; what no rank has stays None. Equal weights: where ranks have
    different numbers of samples, `DataParallel` and `MultiNodeOptimizer` weigh them.

    Raises:
        InputError: a gradient that is not dense; a lazy layer that has no shape yet.
        NotFiniteError: in debug mode (see `tatami.functions.debug`), a gradient that is NaN or infinite; says where.
    """
    named = dict(model.named_parameters())
    refuse_lazy(named, where="average_gradients")
    if debugging():
        check_finite(comm, list(named), list(named.values()))
    parameters = sorted(named.values(), key=lambda each: str(each.dtype))
    for _, group in groupby(parameters, key=lambda each: each.dtype):
        same = list(group)
        for each in same:
            if each.grad is not None and each.grad.layout != torch.strided:
                raise InputError(f"a gradient is {each.grad.layout}; ranks average dense gradients only")
        has = torch.tensor([each.grad is not None for each in same], dtype=same[0].dtype, device=same[0].device)
        flat = [each.new_zeros(each.numel()) if each.grad is None else each.grad.flatten() for each in same]
        vector = torch.cat([*flat, has])
        tuned_allreduce(vector, comm, algorithm=algorithm)
        *sums, counts = torch.split(vector, [*(each.numel() for each in same), len(same)])
        for each, values, count in zip(same, sums, counts.tolist(), strict=True):
            if count:
                each.grad = (values / comm.size).view_as(each)


def average_buffers(model: nn.Module, comm: AbstractCommunicator) -> None:
    """Floating-point buffers (the running statistics of batch norm) become the mean over the ranks. Collective.

    Others, counters say, are left alone. Call it before validation: each rank has seen other samples.
    """
    for buffer in model.buffers():
        if buffer.is_floating_point():
            comm.allreduce(buffer)
            buffer.div_(comm.size)


def check_finite(
    comm: AbstractCommunicator, names: Sequence[str], parameters: Sequence[nn.Parameter], *, step: int | None = None
) -> None:
    """Whether every rank's gradients are finite, asked before they are averaged. Collective.

    Raises:
        NotFiniteError: on all ranks; names the first rank and parameter.
    """
    pairs = zip(names, parameters, strict=True)
    bad = next((name for name, each in pairs if each.grad is not None and not is_finite(each.grad)), None)
    refuse_not_finite(comm, bad, step=step)


def is_finite(gradient: torch.Tensor) -> bool:
    """Whether all of its values are."""
    return bool(gradient.isfinite().all())


def refuse_not_finite(comm: AbstractCommunicator, name: str | None, *, step: int | None) -> None:
    """Raise where a rank has a gradient that is not finite, that of parameter `name`. Collective.

    Raises:
        NotFiniteError: on all ranks; names the first rank and its parameter.
    """
    for rank, bad in problems_of(comm, name).items():
        when = "" if step is None else f" in step {step}"
        raise NotFiniteError(
            f"the gradient of {bad} on rank {rank} of {comm.size} is not finite{when}: the weights would diverge on all "
            "ranks. Look for bad samples there, lower the learning rate, or clip gradients",
            rank=rank,
            iteration=step,
        )
