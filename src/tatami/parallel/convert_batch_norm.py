"""A network with all its batch normalizations over all ranks."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tatami.comm.base import AbstractCommunicator
from tatami.errors import ModelError
from tatami.parallel.batch_norm import MultiNodeBatchNorm

Module = TypeVar("Module", bound=nn.Module)


def create_mnbn_model(model: Module, comm: AbstractCommunicator) -> Module:
    """A copy of `model` with a `MultiNodeBatchNorm` in place of each nn.BatchNorm1d, 2d, 3d and nn.SyncBatchNorm.

    Everything else is a deep copy: values, settings, hooks, and what was shared in `model` is shared in the copy.

    Args:
        model: a network; a batch normalization by itself becomes a MultiNodeBatchNorm.
        comm: the ranks.

    Raises:
        ModelError: a batch normalization that does not know its channels yet, or with a forward of its own; names it.
    """
    memo: dict[int, Any] = {id(comm): comm}
    replaced: list[tuple[nn.Module, MultiNodeBatchNorm]] = []
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            _check(name, module)
            twin = memo[id(module)] = MultiNodeBatchNorm.__new__(MultiNodeBatchNorm)
            replaced.append((module, twin))
    # All twins are known before any is filled: a hook of one may refer to another, or to the model.
    for module, twin in replaced:
        twin.__dict__.update({**deepcopy(module.__dict__, memo), "comm": comm})
    copy: Module = deepcopy(model, memo)
    return copy


def _check(name: str, module: _BatchNorm) -> None:
    kind = type(module)
    where = f"{name or 'the model'} is a {kind.__name__}"
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        raise ModelError(f"{where} that does not know its channels yet; run the model once, then convert it")
    if kind.forward is not _BatchNorm.forward and not isinstance(module, nn.SyncBatchNorm | MultiNodeBatchNorm):
        raise ModelError(f"{where} with a forward of its own, which the copy would lose; replace it by hand")
