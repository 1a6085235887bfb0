"""`loss.backward()` also visits what was communicated and does not reach the loss.

A send after the last receive, or a received tensor that is not used, is no ancestor of the loss, so torch would never come to
it, and its peer would wait for a gradient. torch has no hook that could add roots to a backward pass. So the first
communication of a process puts this in front of `torch.autograd.backward`: where the graph of the loss holds an operation of a
chain, the last token of that chain becomes a root beside the loss. Every other call is handed on as it came.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch

from tatami.functions.chain import NO_GRAPH_TASK, Chain, chains_here

_plain_backward = torch.autograd.backward


def install() -> None:
    """Let all backward passes of this process visit the chains they touch."""
    if torch.autograd.backward is _plain_backward:
        torch.autograd.backward = _backward


@wraps(_plain_backward)
def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    known = chains_here()
    if known and grad_variables is None and torch._C._current_graph_task_id() == NO_GRAPH_TASK:
        roots = _as_list(tensors)
        touched = _touched(roots, known)
        unfinished = [chain for chain, from_its_end in touched.items() if not from_its_end]
        if unfinished:
            given = [None] * len(roots) if grad_tensors is None else _as_list(grad_tensors)
            tensors = [*roots, *(chain.last for chain in unfinished)]
            grad_tensors = [*given, *(None for _ in unfinished)]
        if touched and inputs is not None:
            inputs = [*_as_list(inputs), *(chain.first for chain in touched)]
    _plain_backward(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)


def _as_list(tensors: torch.Tensor | Sequence[Any]) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _touched(roots: Sequence[torch.Tensor], known: Sequence[Chain]) -> dict[Chain, bool]:
    """The chains with an operation that one of `roots` was computed from, and whether their last one was met first."""
    touched: dict[Chain, bool] = {}
    nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(nodes)
    while nodes and len(touched) < len(known):
        node = nodes.pop()
        exchange: Any = getattr(node, "exchange", None)
        chain: Chain | None = None if exchange is None else exchange.chain()
        next_nodes = [edge[0] for edge in node.next_functions]
        if chain is not None and chain in known and chain not in touched:
            touched[chain] = chain.is_last(exchange.index)
            next_nodes.append(chain.last.grad_fn)
        for each in next_nodes:
            if each is not None and each not in seen:
                seen.add(each)
                nodes.append(each)
    return touched
