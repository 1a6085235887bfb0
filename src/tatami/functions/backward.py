"""Running backward so that every operation of the pass is visited, also those that do not lead to the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tatami.comm.base import AbstractCommunicator
from tatami.functions.chain import Chain, all_here, chains_of, retained_last, to_visit
from tatami.functions.joining import touched

_SEED = torch.zeros((), dtype=torch.float32, device="cpu")
"""The gradient of a token: backward begins there, and nothing flows."""

_LARGE = 16 * 1024
"""Elements, from which memory costs more than a view."""


def backward(
    loss: torch.Tensor | None = None,
    comm: AbstractCommunicator | None = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
) -> None:
    """Run backward through all that was communicated since the last backward, and through `loss`.

    A rank without a loss calls `backward()`, and has done its part. A rank with one may as well call `loss.backward()`.

    In the block of a `Pass` it runs through that pass alone. Elsewhere it runs through what belongs to no `Pass`, and through
    each `Pass` that `loss` needs; without a loss through all that are in flight. Where nothing was communicated since a
    backward that retained the graph, it runs through the same passes again, whatever the loss: one that has nothing to do with
    them ends with `loss.backward()`.

    Args:
        loss: a scalar, or a delegate, or any tensor, whose elements are summed; None on a rank without a loss.
        comm: only what was communicated on this communicator; None for all communicators that this thread used.
        retain_graph: as in torch: whether backward may run through the same graph again.
        create_graph: as in torch: whether the gradients can be differentiated.

    Raises:
        CommError: ranks disagree; CommTimeoutError, RankDiedError, ClosedError.
    """
    outputs = () if loss is None or not loss.requires_grad else (loss,)
    roots = [chain.last for chain in _chains(comm, outputs)]
    grads = [_SEED] * len(roots)
    for output in outputs:
        roots.insert(0, output)
        grads.insert(0, _ones(output))
    if roots:
        keep_graph = create_graph if retain_graph is None else retain_graph
        # `torch.autograd.backward` ends in this too. On the way it looks for shapes that are symbols and for other things that
        # are not here, which takes longer than a message between two ranks, and for the first time a second of imports.
        torch.autograd.Variable._execution_engine.run_backward(
            tuple(roots), tuple(grads), keep_graph, create_graph, (), allow_unreachable=True, accumulate_grad=True
        )


def grad(
    outputs: torch.Tensor | Sequence[torch.Tensor] | None,
    inputs: torch.Tensor | Sequence[torch.Tensor],
    comm: AbstractCommunicator | None = None,
    *,
    grad_outputs: torch.Tensor | Sequence[torch.Tensor] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The gradients of `inputs`, as torch.autograd.grad, through all that was communicated; nothing is added to any `.grad`.

    Every rank of the pass takes part: with its outputs, or None; and with its inputs, or `()`.

    Args:
        outputs: scalars, or any with `grad_outputs`; None on a rank without.
        inputs: whose gradients are asked for; zeros for one that reaches no output.
        comm: only what was communicated on this communicator; None for all communicators that this thread used.
        grad_outputs: as in torch.
        retain_graph: as in torch.
        create_graph: as in torch.

    Raises:
        CommError: ranks disagree; CommTimeoutError, RankDiedError, ClosedError.
    """
    given = _as_list(outputs)
    seeds = _as_list(grad_outputs) or [_ones(output) for output in given]
    chains = _chains(comm, given)
    wanted = _as_list(inputs)
    roots = [*given, *(chain.last for chain in chains)]
    if not roots:
        return tuple(torch.zeros_like(each) for each in wanted)
    found = torch.autograd.grad(
        roots,
        [*wanted, *(chain.first for chain in chains)],
        [*seeds, *(torch.zeros_like(chain.last) for chain in chains)],
        retain_graph=retain_graph,
        create_graph=create_graph,
        allow_unused=True,
    )
    pairs = zip(wanted, found[: len(wanted)], strict=True)
    return tuple(torch.zeros_like(each) if gradient is None else gradient for each, gradient in pairs)


def _ones(output: torch.Tensor) -> torch.Tensor:
    """The gradient of the sum of `output`; of a large one without its memory."""
    if output.numel() < _LARGE:
        return torch.ones_like(output)
    return torch.ones((), dtype=output.dtype, device=output.device).expand(output.shape)


def _as_list(tensors: torch.Tensor | Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
    if tensors is None:
        return []
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _chains(comm: AbstractCommunicator | None, outputs: Sequence[torch.Tensor]) -> list[Chain]:
    """The chains whose ends must be roots of backward, beside `outputs`."""
    everything = all_here() if comm is None else [chains_of(comm)]
    wanted, possible = to_visit(everything)
    if not outputs:
        return wanted + possible or retained_last(everything)
    retained = [chain for chains in everything for chain in chains.retained]
    found = list(touched(outputs, possible + retained)) if possible or retained else []
    if not wanted and all(chain in retained for chain in found):  # nothing was communicated since
        again = [chain for chain in retained if chain.goes_with(found)] if found else retained_last(everything)
        found += [chain for chain in again if chain not in found]
    return [*wanted, *found]
