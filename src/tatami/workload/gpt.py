"""A GPT as plain facts, in closed form: two blocks a layer, its heads and its hidden units, and its vocabulary. Pipeline
stages can begin at every attention and every MLP, and at the head.

What is counted, and how, is what `tatami.plan` finds of such a network on a sample batch: products, and `ELEMENT_FLOP` for
each element of other operations.
"""

from __future__ import annotations

from dataclasses import replace

from tatami.errors import PlanError
from tatami.workload.block import ELEMENT_FLOP, Block, Piece
from tatami.workload.recomputation import Recomputation, RecomputedLayer, RepeatedLayer
from tatami.workload.workload import Workload

VOCABULARY = 50_257
"""The vocabulary of GPT-2."""
FEWEST_ROWS = 512
"""Smaller vocabularies are repeated: the sums that they would need take longer than what they save."""
_FLOAT_BYTES = 4
_INDEX_BYTES = 8
_BACKWARD = 3
"""Forward and backward together, for each operation of forward: backward has two products of the same size for each."""


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
    tied: bool = True,
) -> Workload:
    """One iteration of a GPT over `samples` sequences: layers of attention and an MLP, with biases.

    Of each layer the attention splits over its heads (with grouped queries: over the heads of keys and values, each with its
    queries) and the MLP over its hidden units; a vocabulary of `FEWEST_ROWS` or more over its rows. What is left of embeddings
    and head, and the layer norms, are repeated by every rank of a replica. The flop of attention grow with the square of the
    tokens; activations are those of float32, without the scores, which `scaled_dot_product_attention` does not keep.

    Args:
        layers: how many.
        width: of a token's vector.
        heads: of queries.
        tokens: of a sequence, which is a sample.
        samples: of the global batch.
        kv_heads: of keys and values; as many as `heads` where None.
        vocabulary: tokens there are.
        hidden: units of each MLP; 4 x `width` where None.
        tied: whether the head has the weights of the embedding; otherwise it has weights of its own, and a bias.

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
    normed, norms = tokens * width, 2 * layers + 1
    blocks = []
    for layer in range(layers):
        blocks += [
            _attention(f"h.{layer}.attn", width=width, heads=heads, kv_heads=kv_heads, tokens=tokens),
            _mlp(f"h.{layer}.mlp", width=width, hidden=hidden, tokens=tokens),
        ]
    row = width if tied else 2 * width + 1
    split = vocabulary >= FEWEST_ROWS
    if split:
        blocks.append(_vocabulary("wte", vocabulary=vocabulary, width=width, tokens=tokens, row=row))
    # Norms, what is added to what (two a layer, and the two embeddings), and the head, unless the vocabulary is split.
    elements_flop = ELEMENT_FLOP * (norms + 2 * layers + 1) * normed
    head_flop = -normed / _BACKWARD if split else 2 * vocabulary * normed
    norm_bytes = _FLOAT_BYTES * (2 * normed + 2 * tokens)
    outside_bytes = 2 * _INDEX_BYTES * tokens + (0 if split else 2 * _FLOAT_BYTES * vocabulary * tokens)
    layers_flop = sum(block.flop(units=block.units, samples=1) for block in blocks[: 2 * layers])
    layers_flop += 4 * layers * _BACKWARD * ELEMENT_FLOP * normed  # two norms, and two sums
    replicated_flop = round(_BACKWARD * (elements_flop + head_flop))
    all_flop = sum(block.flop(units=block.units, samples=1) for block in blocks) + replicated_flop
    return Workload(
        samples=samples,
        blocks=tuple(blocks),
        # The embedding of places, norms, and the biases of what ends in a sum.
        replicated_parameters=(0 if split else vocabulary * row) + normed + norms * 2 * width + 2 * layers * width,
        # Of each layer two norms, attention and MLP of two linear layers each, all with biases; a last norm; two embeddings.
        trained_tensors=12 * layers + 2 + 2 + (0 if tied else 2),
        replicated_flop_per_sample=replicated_flop,
        update_bytes_per_parameter=2 * _FLOAT_BYTES,
        largest_parameters=width * max(tokens, 0 if split else vocabulary),
        # What every norm reads and gives, with means and deviations; the tokens, as they come and their places; and the logits
        # with what a loss keeps of them.
        replicated_activation_bytes=norms * norm_bytes + outside_bytes,
        recomputation=Recomputation(
            kept_bytes=layers * _FLOAT_BYTES * normed + norm_bytes + outside_bytes,
            layers=tuple(
                RecomputedLayer(beside_bytes=2 * norm_bytes, blocks=(2 * layer, 2 * layer + 1)) for layer in range(layers)
            ),
            flop_fraction=layers_flop / _BACKWARD / all_flop,
        )
        if layers > 1
        else None,
        pieces=_pieces(
            blocks,
            layers=layers,
            width=width,
            heads=heads,
            kv_heads=kv_heads,
            hidden=hidden,
            tokens=tokens,
            vocabulary=vocabulary,
            tied=tied,
        ),
    )


def _pieces(
    blocks: list[Block],
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    tokens: int,
    vocabulary: int,
    tied: bool,
) -> tuple[Piece, ...]:
    """The embedding; each attention and each MLP, with the norm before and the sum after it; the head with its norm."""
    normed, table = tokens * width, vocabulary * width
    norm_bytes = _FLOAT_BYTES * (2 * normed + 2 * tokens)
    shared = (("wte", table),) if tied else ()
    split = blocks[2 * layers :]
    # Reading a row for each token counts nothing, but a vocabulary that is split counts a flop for each of its rows at least.
    reading_flop = sum(max(0, block.units - normed) for block in split)
    embedding = Piece(
        name="wte",
        flop_per_sample=_BACKWARD * ELEMENT_FLOP * normed + reading_flop,
        parameters=table + normed,
        largest_parameters=max(table, normed),
        activation_bytes_per_sample=2 * _INDEX_BYTES * tokens,
        shared=shared,
    )
    head = Piece(
        name="ln_f",
        flop_per_sample=_BACKWARD * (ELEMENT_FLOP + 2 * vocabulary) * normed,
        late_flop_per_sample=2 * vocabulary * normed,
        parameters=2 * width + table + (0 if tied else vocabulary),
        largest_parameters=table,
        activation_bytes_per_sample=norm_bytes
        + 2 * _FLOAT_BYTES * vocabulary * tokens
        + sum(block.sample_activation_bytes for block in split),
        crossing_bytes_per_sample=_FLOAT_BYTES * normed,
        shared=shared,
    )
    inner = [
        Piece(
            name=block.name,
            flop_per_sample=block.flop(units=block.units, samples=1) + 2 * _BACKWARD * ELEMENT_FLOP * normed,
            late_flop_per_sample=2 * normed * (2 * hidden if index % 2 else 2 * width + 2 * width // heads * kv_heads),
            parameters=block.parameters + 3 * width,
            largest_parameters=round(block.units * block.unit_largest),
            activation_bytes_per_sample=norm_bytes + block.unit_activation_bytes * block.units,
            crossing_bytes_per_sample=_FLOAT_BYTES * normed,
            blocks=((block, 1),),
        )
        for index, block in enumerate(blocks[: 2 * layers])
    ]
    for index in range(0, 2 * layers if layers > 1 else 0, 2):
        own = inner[index : index + 2]
        layer = RepeatedLayer(
            name=f"h.{index // 2}",
            pieces=2,
            kept_bytes=sum(piece.activation_bytes_per_sample for piece in own),
            input_bytes=_FLOAT_BYTES * normed,
            flop=sum(piece.flop_per_sample for piece in own) / _BACKWARD,
        )
        inner[index] = replace(own[0], layers=(layer,))
    return (embedding, *inner, head)


def _attention(name: str, *, width: int, heads: int, kv_heads: int, tokens: int) -> Block:
    head, queries = width // heads, heads // kv_heads
    outputs = queries * head
    inner = outputs + 2 * head  # q, k and v of one group
    weights = width * inner + outputs * width
    return Block(
        units=kv_heads,
        unit_parameters=weights + inner,
        forward_elements=tokens * width,
        backward_elements=tokens * width,
        flop_per_unit=_BACKWARD * (2 * tokens * weights + 4 * queries * tokens * tokens * head),
        # Queries, keys and values, what comes out, and the logarithm of the sum of each query's scores.
        unit_activation_bytes=_FLOAT_BYTES * tokens * (inner + outputs + queries),
        unit_largest=width * inner,
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
        flop_per_unit=_BACKWARD * tokens * (4 * width + ELEMENT_FLOP),
        unit_activation_bytes=2 * _FLOAT_BYTES * tokens,  # before the activation and after it
        unit_largest=width,
        name=name,
    )


def _vocabulary(name: str, *, vocabulary: int, width: int, tokens: int, row: int) -> Block:
    """The rows of the embedding and of the head, with its cross-entropy."""
    return Block(
        units=vocabulary,
        unit_parameters=row,
        # The embedding, and of every row of logits the logarithms of the parts' sums and the logit of the target.
        forward_elements=tokens * width + 3 * tokens,
        backward_elements=tokens * width,
        flop_per_unit=max(1.0, tokens * width / vocabulary) + _BACKWARD * 2 * tokens * width,
        forward_sums=2,
        unit_activation_bytes=2 * _FLOAT_BYTES * tokens,
        unit_largest=width,
        # The places of the tokens and of the targets, and the logarithm of every sum.
        sample_activation_bytes=3 * _INDEX_BYTES * tokens,
        name=name,
        kind="vocabulary",
        unit="row",
    )
