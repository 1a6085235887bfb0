"""`loss.backward()` also visits what was communicated and does not reach the loss.

A send after the last receive, or a received tensor that is not used, is not an ancestor of the loss, so torch would never come
to it, and its peer would wait for a gradient. So the end of the chain must become a root of the backward pass beside the loss,
and the one place that knows the roots is the call itself. Therefore the first differentiable communication of a process puts a
function in front of `torch.autograd.backward`, once: where the graph of the loss holds an operation of a chain that is not
over, the last token of the chain becomes a root, as do those of other communicators in the same pass. Every other call, and
every call while no chain is open, is handed on as it came.

What torch has beside that comes too late. A hook on a node, a tensor or several tensors (`register_multi_grad_hook`), or
`queue_callback`, runs when the pass is under way, and roots cannot be added then. A second pass from within, over what comes
later on the chain, may go through modules that the first one goes through as well, whose buffers torch has freed or will need
again; and the gradient of the node from which it is started is complete only after it. To hold back a received tensor until
then, the later operations would have to be made from it, and they did not exist when it was returned. A `TorchFunctionMode` or
a subclass of Tensor would see every operation of the program.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from tatami.functions.chain import NO_GRAPH_TASK, Chain, chains_here

_installing = threading.Lock()
_plain_backward: Callable[..., None] | None = None
"""What stood there before: torch's function, or a wrapper of it. None while nothing is installed."""


def install() -> None:
    """Let all backward passes of this process visit the chains they touch; does nothing the second time."""
    global _plain_backward
    if _plain_backward is not None:
        return
    with _installing:
        if _plain_backward is None:
            _plain_backward = torch.autograd.backward
            torch.autograd.backward = wraps(_plain_backward)(_backward)


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    assert _plain_backward is not None
    known = chains_here()
    if known and grad_variables is None and torch._C._current_graph_task_id() == NO_GRAPH_TASK:
        roots = _as_list(tensors)
        met = touched(roots, known)
        met |= dict.fromkeys((chain for chain in known if chain not in met and chain.goes_with(met)), False)
        unfinished = [chain for chain, from_its_end in met.items() if not from_its_end]
        if unfinished:
            given = [None] * len(roots) if grad_tensors is None else _as_list(grad_tensors)
            tensors = [*roots, *(chain.last for chain in unfinished)]
            grad_tensors = [*given, *(None for _ in unfinished)]
        if met and inputs is not None:
            inputs = [*_as_list(inputs), *(chain.first for chain in met)]
    _plain_backward(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)


def _as_list(tensors: torch.Tensor | Sequence[Any]) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def touched(roots: Sequence[torch.Tensor], known: Sequence[Chain]) -> dict[Chain, bool]:
    """The chains of `known` with an operation that one of `roots` was computed from, and whether their last was met first."""
    found: dict[Chain, bool] = {}
    nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(nodes)
    while nodes and len(found) < len(known):
        node = nodes.pop()
        exchange: Any = getattr(node, "exchange", None)
        chain: Chain | None = None if exchange is None else exchange.chain
        next_nodes = [edge[0] for edge in node.next_functions]
        if chain is not None and chain in known and chain not in found:
            found[chain] = chain.is_last(exchange.index)
            next_nodes.append(chain.last.grad_fn)
        for each in next_nodes:
            if each is not None and each not in seen:
                seen.add(each)
                nodes.append(each)
    return found
