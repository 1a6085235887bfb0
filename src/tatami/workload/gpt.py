"""A GPT as plain facts, in closed form: two blocks a layer, its heads and its hidden units."""

from __future__ import annotations

from tatami.errors import PlanError
from tatami.workload.block import Block
from tatami.workload.workload import Workload

VOCABULARY = 50_257
"""Of GPT-2."""
_FLOAT_BYTES = 4
_BACKWARD = 3
"""Forward and backward together, for each operation of forward: backward has two products of the same size for each."""
_SOFTMAX_FLOP = 5
_GELU_FLOP = 10
_NORM_FLOP = 8


def gpt_workload(
    *,
    layers: int,
    width: int,
    heads: int,
    tokens: int,
    samples: int,
    kv_heads: int | None = None,
    vocabulary: int = VOCABULARY,
    hidden: int | None = None,
) -> Workload:
    """One iteration of a GPT over `samples` sequences: layers of attention and an MLP, with biases, and tied embeddings.

    Of each layer the attention splits over its heads (with grouped queries: over the heads of keys and values, each with its
    queries) and the MLP over its hidden units. The embedding, the head that shares its weights, and the layer norms are
    repeated by every rank of a column. The flop of attention grow with the square of the tokens; activations are those of
    float32, without the scores, which `scaled_dot_product_attention` does not keep.

    Args:
        layers: how many.
        width: of a token's vector.
        heads: of queries.
        tokens: of a sequence, which is a sample.
        samples: of the global batch.
        kv_heads: of keys and values; as many as `heads` where None.
        vocabulary: tokens there are.
        hidden: units of each MLP; 4 x `width` where None.

    Raises:
        PlanError: a size below 1, or heads that do not divide what they share.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    hidden = 4 * width if hidden is None else hidden
    sizes = {"layers": layers, "width": width, "heads": heads, "tokens": tokens, "kv_heads": kv_heads, "hidden": hidden}
    for name, size in {**sizes, "vocabulary": vocabulary}.items():
        if size < 1:
            raise PlanError(f"{name} of a GPT must be at least 1, not {size}")
    if width % heads:
        raise PlanError(f"a width of {width} does not divide by {heads} heads; take a width that is a multiple of the heads")
    if heads % kv_heads:
        raise PlanError(f"{heads} heads of queries do not divide by {kv_heads} heads of keys and values; take a divisor")
    normed = tokens * width
    blocks = []
    for layer in range(layers):
        blocks += [
            _attention(f"h.{layer}.attn", width=width, heads=heads, kv_heads=kv_heads, tokens=tokens),
            _mlp(f"h.{layer}.mlp", width=width, hidden=hidden, tokens=tokens),
        ]
    norms = 2 * layers + 1
    return Workload(
        samples=samples,
        blocks=tuple(blocks),
        # The embeddings of tokens (which are the head's, too) and of places, norms, and the biases of what ends in a sum.
        replicated_parameters=(vocabulary + tokens) * width + norms * 2 * width + 2 * layers * width,
        # Of each layer two norms, attention and MLP of two linear layers each, all with biases; a last norm; two embeddings.
        trained_tensors=12 * layers + 2 + 2,
        replicated_flop_per_sample=_BACKWARD * (2 * vocabulary * normed + _SOFTMAX_FLOP * vocabulary * tokens)
        + _BACKWARD * norms * _NORM_FLOP * normed,
        # What every norm reads, and the logits with their gradient.
        replicated_activation_bytes=_FLOAT_BYTES * (norms * normed + 2 * vocabulary * tokens),
    )


def _attention(name: str, *, width: int, heads: int, kv_heads: int, tokens: int) -> Block:
    head, queries = width // heads, heads // kv_heads
    outputs = queries * head
    inner = outputs + 2 * head  # q, k and v of one group
    weights = width * inner + outputs * width
    scores = queries * tokens * tokens
    flop = 2 * tokens * weights + scores * (4 * head + _SOFTMAX_FLOP)
    return Block(
        units=kv_heads,
        unit_parameters=weights + inner,
        forward_elements=tokens * width,
        backward_elements=tokens * width,
        flop_per_unit=_BACKWARD * flop,
        unit_activation_bytes=_FLOAT_BYTES * tokens * (inner + outputs),
        sample_activation_bytes=_FLOAT_BYTES * tokens * width,
        name=name,
        kind="attention",
        unit="head" if kv_heads == heads else "group of heads",
    )


def _mlp(name: str, *, width: int, hidden: int, tokens: int) -> Block:
    return Block(
        units=hidden,
        unit_parameters=2 * width + 1,
        forward_elements=tokens * width,
        backward_elements=tokens * width,
        flop_per_unit=_BACKWARD * tokens * (4 * width + _GELU_FLOP),
        unit_activation_bytes=_FLOAT_BYTES * 2 * tokens,
        sample_activation_bytes=_FLOAT_BYTES * tokens * width,
        name=name,
    )
