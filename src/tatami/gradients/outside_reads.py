"""Weights that a loss reads outside of the network's forward pass, as a penalty on them does, where that would be wrong.

The gradient of a penalty comes to the parameter as any other does, and is exact where each rank has whole weights and the
loss is a mean: every replica adds the same term, and their weights sum to 1. There are two other cases:

- ranks of a replica share the units of a weight: a sum over its elements (`weight.square().sum()`) has the right gradient, its
  norm has not, and the value of either is of this rank's units;
- the loss is a sum over samples: every replica adds the term.

Autograd numbers the operations of a thread. What reads a parameter in the graph of a loss, and has no number of a forward
pass, is outside. Graphs are looked at before they are gone through, in the first passes and now and then; for a sum in every
pass.
"""

from __future__ import annotations

import functools
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import nn

from tatami.comm.agreement import fail_together
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError, warn
from tatami.gradients.loss_factors import Constant, LossFacts, refuse_other_factors
from tatami.gradients.loss_graph import refuse_coupling_loss
from tatami.gradients.passes import are_made_by

_LOOKS: Final = 8
"""The first passes are looked at, for a loss takes what it takes from the beginning;"""
_EVERY: Final = 50
"""and then one of so many, for terms that begin later."""
_KEPT: Final = 1024
"""Forward passes whose numbers are kept."""
_LINEAR = frozenset({
    "AddBackward0", "SubBackward0", "NegBackward0", "ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0",
    "SqueezeBackward0", "UnsqueezeBackward0", "StackBackward0", "CatBackward0", "ToCopyBackward0", "CloneBackward0",
    "AliasBackward0", "TBackward0",
})  # fmt: skip
_PRODUCTS = frozenset({"MulBackward0", "DivBackward0"})
_SUMS = frozenset({"SumBackward0", "SumBackward1"})
_ELEMENTWISE = frozenset({"PowBackward0", "AbsBackward0", "ExpBackward0", "LogBackward0", "SqrtBackward0"}) | _PRODUCTS
_here = threading.local()
_lock = threading.Lock()
_number: Any = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


class OutsideReads:
    """Reads of one model's weights outside of its forward pass.

    Args:
        module: the network.
        cut: the names of parameters of which a rank may have some units only.
        replicas: the ranks of each replica now.
        warns: whether this rank warns, for all ranks.
        comm: the ranks, which are told what this one refuses.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        cut: Iterable[str],
        replicas: Callable[[], list[list[int]]],
        warns: bool,
        comm: AbstractCommunicator,
    ) -> None:
        self.comm = comm
        self._module = weakref.ref(module)
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._cut, self._replicas = frozenset(cut), replicas
        self.warns = warns
        self.defer: Callable[[Callable[[], None], list[Any]], bool] = lambda *_: False
        """Whether a backward pass from some nodes is run later, by what this is."""
        self.adds_terms = False
        """Whether the loss is a sum over samples, computed in several parts."""
        self.samples: int | None = None
        """Samples of this rank, where the loss is a mean over samples, computed in several parts; 0: a sum; None: in one part,
        or of a single sample, of which all numbers are single."""
        self.batch: int | None = None
        """Samples of the global batch, where they are known."""
        self.num_passes = 0
        """Forward passes that all ranks make: those of micro-batches count as one."""
        self.facts = 0, LossFacts()
        """The pass of the loss that was judged last, and what it shows, for `refuse_other_factors`."""
        self.parts: list[list[LossFacts]] = []
        """What each loss of each micro-batch of the batch shows, as far as it was judged; empty outside of such a loop."""
        self.rows: tuple[Constant, ...] = ()
        """How many rows an output has for each row of the input, where the samples of neither are known."""
        self.warns_of_doubts = comm.rank == 0
        """Whether this rank warns of what all ranks see."""
        self._num_doubts = [0, 0]
        self._spans: list[tuple[int, int]] = []
        self._num_looks = 0
        self._warns_of_others = True
        self._read: str | None = None
        _watch()

    def begin(self) -> int:
        """A forward pass begins."""
        _models().add(self)
        begun: int = _number()
        return begun

    def end(self, begun: int) -> None:
        """The forward pass that began at the number `begun` is over."""
        self._spans.append((begun, _number()))
        if len(self._spans) > _KEPT:
            del self._spans[: _KEPT // 2]

    def close(self) -> None:
        """Look at no backward pass any more."""
        _models().discard(self)

    def refuse(self, where: str) -> None:
        """
        Args:
            where: what gives the value of the loss, in which the term is of this rank's units.

        Raises:
            InputError: there is such a term. The same on all ranks.
        """
        if self._read is not None and self._shares_units:
            raise InputError(
                f"the loss reads {self._read} outside of the network's forward pass, as a penalty does, and a rank has some of "
                f"its units only: the loss of {where} would be wrong. Use the optimizer's weight_decay, which is exact; or a "
                "loop of your own, where the gradient of a sum over elements is"
            )

    @property
    def is_due(self) -> bool:
        """Whether the next loss is looked at."""
        return self._num_looks < _LOOKS or self._num_looks % _EVERY == 0

    def look(self, roots: Sequence[Any]) -> None:
        """A backward pass from these nodes begins.

        Raises:
            InputError: its gradient would be wrong. The same on all ranks.
        """
        is_due = self.is_due
        self._num_looks += 1
        is_judged = False
        if self.parts:
            self.parts[-1].append(LossFacts())  # a micro-batch may have several losses, of which some are looked at
        if is_due and are_made_by(self, roots):  # another model may be alive as well
            is_judged = self.samples is not None
            facts = LossFacts() if self.samples is None else refuse_coupling_loss(roots, samples=self.samples)
            self.facts = self.num_passes, facts._replace(constants=facts.constants + self.rows)
            if self.parts:
                self.parts[-1][-1] = facts
                place = len(self.parts[-1]) - 1
                in_place = [part[place] if len(part) > place else LossFacts() for part in self.parts]
                refuse_other_factors([(0, each) for each in in_place], of="micro-batch")
            self._warn_of_doubts(facts)
        if not self.adds_terms and not is_judged and not (is_due and self._shares_units):
            return
        others = []
        for parameter, is_exact in _reads(roots, self._is_inside):
            name = self._names.get(parameter)
            if name is None:
                others.append(parameter)
                continue
            if self.adds_terms:
                raise InputError(
                    f"the loss reads {name} outside of the network's forward pass, as a penalty does, and is a sum over "
                    "samples, to which every replica and micro-batch adds that term. Use weight_decay, or a loss "
                    "that is a mean"
                )
            if name in self._cut and self._shares_units:
                self._take(name, is_exact=is_exact)
        if is_judged and others:
            self._warn_of(others)

    def _warn_of_doubts(self, facts: LossFacts) -> None:
        """Warn of what is most likely wrong, when it is seen for the second time: once may be by chance."""
        here, batch = self.samples, self.batch
        doubts = {
            f"the loss divides a sum over the {here} samples of rank {self.comm.rank} by {batch}, the size of the whole batch; "
            "reduction='mean' says that it is the mean over them. Divide by their own number, len(x), or give reduction='sum'. "
            f"If {batch} is meant as a multiple of {here}, it is right as it is": here and here != batch in facts.divisors,
            f"the loss multiplies the samples of rank {self.comm.rank} by weights that sum to 1 or are 0 or 1 in the mean, or "
            "has targets that are 0 in the mean. If they were normalized over these samples, gradients depend on how the batch "
            "is laid over the ranks: normalize over the global batch, before model.local(...), or by model.over_batch(their "
            "mean)": facts.has_weights_of_1,
        }
        for number, (doubt, is_found) in enumerate(doubts.items()):
            self._num_doubts[number] += bool(is_found)
            if is_found and self._num_doubts[number] == 2 and self.warns_of_doubts:
                warn(doubt)

    def _warn_of(self, others: Sequence[torch.Tensor]) -> None:
        """Warn of a weight that is trained with the network, and is no part of one whose gradients are summed."""
        if not self._warns_of_others or self.comm.rank:
            return
        modules = [module for model in _models() if (module := model._module()) is not None]
        summed = {id(parameter) for module in modules for parameter in module.parameters()}
        outside = next((each for each in others if isinstance(each, nn.Parameter) and id(each) not in summed), None)
        if outside is not None:
            self._warns_of_others = False
            warn(
                f"the loss trains a weight of shape {tuple(outside.shape)} that is in none of the networks which are tiled: "
                "each rank has the gradient of its own samples, so that ranks drift apart. Put it into the network, or sum its "
                "gradient over the ranks"
            )

    def _take(self, name: str, *, is_exact: bool) -> None:
        if not is_exact:
            raise InputError(
                f"the loss reads {name} outside of the network's forward pass, and a rank has some of its units only: the "
                "gradient of a norm, or of anything else than a sum over elements, would be wrong. Take sums over elements "
                "(weight.square().sum()), the optimizer's weight_decay, or replicas of one rank (layout=...)"
            )
        self._read = name
        if self.warns:
            self.warns = False
            warn(
                f"the loss reads {name} outside of the network's forward pass, and a rank has some of its units only: the "
                "gradient of a sum over elements is exact, but the value of the loss is of this rank's units"
            )

    def _is_inside(self, number: int) -> bool:
        place = bisect_right(self._spans, (number, float("inf"))) - 1
        return place >= 0 and number < self._spans[place][1]

    @property
    def _shares_units(self) -> bool:
        return any(len(replica) > 1 for replica in self._replicas())


def _reads(roots: Iterable[Any], is_inside: Callable[[int], bool]) -> Iterable[tuple[nn.Parameter, bool]]:
    """Parameters that are read by nodes outside of forward passes, and whether each is read as a sum over its elements.

    A path from the loss down may go through linear operations, then one sum, then operations element by element; a sum below
    one that is not linear would be of parts.

    Raises:
        InputError: an embedding in a forward pass counts its samples.
    """
    waiting: list[tuple[Any, tuple[bool, bool] | None]] = [(root, (False, False)) for root in roots]
    seen = set[Any]()
    while waiting:
        node, state = waiting.pop()
        if node is None or (node, state) in seen:
            continue
        seen.add((node, state))
        following = [other for other, _ in node.next_functions if other is not None]
        inside = is_inside(node._sequence_nr())
        if inside and getattr(node, "_saved_scale_grad_by_freq", False):
            raise InputError(
                "an embedding divides gradients by how often its samples look up a row, and a rank sees only its own samples. "
                "Leave scale_grad_by_freq out"
            )
        below = None if inside else _below(node.name(), state, len(following))
        for other in following:
            parameter = getattr(other, "variable", None)
            if parameter is None:
                waiting.append((other, below))
            elif not inside:
                yield parameter, below is not None and below[0]


def _below(name: str, state: tuple[bool, bool] | None, branches: int) -> tuple[bool, bool] | None:
    """(whether there was a sum, whether anything since was not linear) below a node; None where it is no sum over elements."""
    if state is None:
        return None
    summed, bent = state
    if name in _LINEAR or (name in _PRODUCTS and branches == 1):
        return state
    if name in _SUMS:
        return None if bent else (True, False)
    return (True, True) if name in _ELEMENTWISE and summed else None


@torch.enable_grad()
def _weighed_roots(tensors: Sequence[Any], gradients: Any) -> list[Any]:
    """The last nodes of these losses; where one is given a gradient, of the sum that this stands for."""
    given = gradients if isinstance(gradients, Sequence) else [gradients] * len(tensors)
    found = []
    for tensor, gradient in zip(tensors, given, strict=False):
        if type(tensor) is torch.Tensor and type(gradient) is torch.Tensor and tensor.shape == gradient.shape:
            first = gradient.detach().flatten()[:1].sum()
            tensor = tensor.sum() * first if bool((gradient == first).all()) else (tensor * gradient.detach()).sum()
        found += [tensor.grad_fn] if isinstance(tensor, torch.Tensor) else []
    return found


def _models() -> weakref.WeakSet[OutsideReads]:
    """The models of this thread."""
    found: weakref.WeakSet[OutsideReads] = _here.__dict__.setdefault("models", weakref.WeakSet())
    return found


def _watch() -> None:
    """From now on, look at graphs before backward passes go through them."""
    with _lock:
        backward = torch.autograd.backward
        if hasattr(backward, "tatami_looks"):
            return

        @functools.wraps(backward)
        def look_first(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            models = getattr(_here, "models", None)
            if models and torch._C._current_graph_task_id() < 0:
                given = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
                roots = [each.grad_fn for each in given if isinstance(each, torch.Tensor)]
                gradients = args[0] if args else kwargs.get("grad_tensors")
                is_weighed = gradients is not None and any(model.is_due for model in list(models))
                judged = _weighed_roots(given, gradients) if is_weighed else roots
                for model in list(models):
                    with fail_together(model.comm, only=InputError):
                        model.look(judged)
                run = functools.partial(backward, tensors, *args, **kwargs)
                if any(model.defer(run, roots) for model in list(models)):
                    return None
            return backward(tensors, *args, **kwargs)

        look_first.tatami_looks = True  # type: ignore[attr-defined]
        torch.autograd.backward = look_first
