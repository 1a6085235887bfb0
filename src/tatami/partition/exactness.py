"""What a tiled run could not compute as one machine does, refused by name before anything starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tatami.errors import ModelError
from tatami.gradients.base import refuse_counted_rows
from tatami.partition.linear_pairs import traced
from tatami.partition.tracing.capturing import Captured
from tatami.partition.tracing.exporting import line_of_caller

_RANDOM_FUNCTIONS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu,
    F.gumbel_softmax, torch.dropout, torch.bernoulli, torch.rand_like, torch.randn_like, torch.rand, torch.randn,
}  # fmt: skip
_RANDOM_MODULES = (
    nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU,
    nn.FractionalMaxPool2d, nn.FractionalMaxPool3d,
)  # fmt: skip
RandomDraws: TypeAlias = Literal["plain", "local"]
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Layers that are given the statistics of the global batch."""


def refuse_inexact(
    model: nn.Module,
    *,
    followed: Collection[str],
    captured: Captured | None,
    written: Collection[str] = (),
    random: RandomDraws = "plain",
) -> None:
    """Refuse layers whose result would depend on the tiling.

    Args:
        followed: modules that run a program of their own, in which random numbers are drawn for the whole batch.
        captured: what was seen on a sample batch; None where there was none.
        written: the weights that its forward passes have changed.
        random: whether random layers that cannot draw as the plain model does are refused ("plain"), or not ("local").

    Raises:
        ModelError: names the layer, and what to use in its place.
    """
    if captured is not None and captured.draws_outside is not None:
        raise ModelError(
            f"the forward pass draws from {captured.draws_outside}, of which every rank has a state of its own, so ranks would "
            "compute different networks. Draw with torch (torch.rand(()) < p), and give tatami.tile random='local'"
        )
    if captured is not None and captured.mixed:
        raise ModelError(f"{captured.mixed}. Only batch normalization (torch.nn.BatchNorm1d to 3d) may look at the whole batch")
    for name, module in model.named_modules():
        what = f"layer {name or '(the model itself)'} ({type(module).__name__})"
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and type(module) not in BATCH_NORMS:
            raise ModelError(
                f"{what} takes its statistics over the batch in a way of its own; use one of torch.nn.BatchNorm1d to 3d"
            )
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
            raise ModelError(f"{what} keeps running statistics of this rank's samples alone. Set track_running_stats=False")
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ModelError(f"{what} has sparse gradients, which are not summed over ranks. Set sparse=False")
        refuse_counted_rows(name, module)
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ModelError(
                f"{what} shortens the rows that its samples look up, and a rank sees only its own samples. Set max_norm=None"
            )
        if any(name == other or name.startswith(f"{other}.") or not other for other in followed):
            continue
        if captured is not None and name in captured.normalizes and type(module) not in BATCH_NORMS:
            raise ModelError(f"{what} calls torch's batch_norm on this rank's samples alone. Use torch.nn.BatchNorm1d to 3d")
        draws = name in captured.draws and type(module) is not nn.Dropout if captured is not None else _may_draw(module)
        if draws and random == "plain":
            raise ModelError(
                f"{what} draws random numbers in training, which a tiled run could not draw as one machine does. "
                "Use torch.nn.Dropout, set its probability to 0, or give tatami.tile random='local', with which every replica "
                "draws its own"
            )
    _refuse_written(written, traced(model).written if captured is None else captured.leaves_behind.of_samples)
    if captured is None and random == "plain":
        _refuse_random_functions(model)


def _refuse_written(weights: Collection[str], kept: Collection[str]) -> None:
    """What a forward pass may not leave behind."""
    if weights:
        raise ModelError(
            f"the forward pass changes weights ({', '.join(weights)}), which a rank would do with a part of them, or by a part "
            "of the samples. Change them between two steps, or compute with what is made of them and leave them as they are"
        )
    if kept:
        raise ModelError(
            f"in training the forward pass keeps something of its samples for later ({', '.join(kept)}). A rank sees only its "
            "own samples, so this would not be what one machine keeps. torch.nn.BatchNorm1d to 3d keep running means and "
            "variances of the whole batch (with affine=False, and nothing else); compute other things between two steps"
        )


def _may_draw(module: nn.Module) -> bool:
    if isinstance(module, _RANDOM_MODULES) or (isinstance(module, nn.Dropout) and type(module) is not nn.Dropout):
        return True
    dropout = getattr(module, "dropout", 0.0)
    return isinstance(dropout, float) and dropout > 0.0


def _refuse_random_functions(model: nn.Module) -> None:
    graph = traced(model).graph
    for node in graph.nodes if graph is not None else ():
        random_method = node.op == "call_method" and str(node.target).rstrip("_") in ("bernoulli", "normal", "uniform")
        random_function = node.op == "call_function" and node.target in _RANDOM_FUNCTIONS and not _is_off(node.kwargs)
        if random_method or random_function:
            target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            raise ModelError(
                f"the forward pass calls {target} (node {node.name}), whose random numbers a tiled run could not draw as one "
                "machine does. Use a torch.nn.Dropout layer, or give tatami.tile random='local', with which every replica "
                "draws its own"
            )


def refuse_other_reduction(model: nn.Module, captured: Captured | None, reduction: str | None) -> None:
    """
    Raises:
        ModelError: the numbers that the network gives, or keeps in its modules, are weighed as means and are sums, or the other
            way around.
    """
    if captured is None or reduction not in ("mean", "sum") or reduction in captured.reductions:
        return
    (other,) = captured.reductions
    raise ModelError(
        f"{type(model).__name__} gives, or keeps in a module, a number that is the {other} of what its samples give, and the "
        f"reduction is {reduction!r}, by which it would be weighed as well. Take the {reduction} of both, and detach() what is "
        "only to be looked at"
    )


class RefusingDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A forward pass in which nothing may be drawn but from generators that are given to what draws.

    For networks of which no sample was seen: torch.fx sees no noise of a fixed shape, which would be another on every rank.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, 40 MiB and a second, to keep it away from this

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            line = line_of_caller()
            raise ModelError(
                f"the forward pass draws random numbers{line and f' at {line}'} ({func}), which a tiled run could not draw as "
                "one machine does. Use a torch.nn.Dropout layer, or give tatami.tile random='local', with which every replica "
                "draws its own"
            )
        return func(*args, **kwargs)


def _draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    given = {argument.name: argument.default_value for argument in func._schema.arguments if argument.has_default_value()}
    given |= {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    given |= kwargs
    return given.get("generator") is None and not _is_off(given)


def _is_off(given: Mapping[str, Any]) -> bool:
    return given.get("dropout_p") == 0.0 or given.get("train") is False or given.get("training") is False


def refuse_compiled(model: nn.Module) -> None:
    """
    Raises:
        ModelError: it, or a part of it, is what `torch.compile` or `torch.jit` made.
    """
    for name, module in model.named_modules():
        is_compiled = type(module).__module__.startswith("torch._dynamo") or module._compiled_call_impl is not None
        if is_compiled or isinstance(module, torch.jit.ScriptModule):
            maker = "torch.compile" if is_compiled else "torch.jit"
            raise ModelError(
                f"{f'layer {name}' if name else 'the network'} was made by {maker}, and cannot be looked into or split. Give "
                "the network that it was made of"
            )
