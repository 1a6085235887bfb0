"""Translates number words to digits and digits to words: each encoder on one rank, its decoder on the other. Start it with:

tatami run -n 2 examples/seq2seq.py

Rank 0 reads words and writes words; rank 1 reads digits and writes digits. Both translate at the same time.
"""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import tatami
from tatami import functions
from tatami.parallel import create_multi_node_n_step_rnn

NUMBERS, HELD_OUT, EPOCHS, BATCH = 10_000, 1_000, 4, 128
PAD, END = 0, 1
NAMES = """zero one two three four five six seven eight nine ten
eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen
twenty thirty forty fifty sixty seventy eighty ninety"""
ONES, TENS = NAMES.split()[:20], NAMES.split()[20:]


def words(number: int) -> list[str]:
    """Spell a number: nine, thousand, nine, hundred, ninety, nine."""
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if number >= size:
            return [*words(number // size), name, *(words(number % size) if number % size else [])]
    if number >= 20:
        return [TENS[number // 10 - 2], *(words(number % 10) if number % 10 else [])]
    return [ONES[number]]


def encoded(texts: list[list[str]]) -> tuple[torch.Tensor, list[str]]:
    """Return each text as tokens, `(texts, longest + 1)`, and the vocabulary."""
    vocabulary = ["", "", *sorted({word for text in texts for word in text})]
    token = {word: i for i, word in enumerate(vocabulary)}
    rows = [torch.tensor([*(token[word] for word in text), END]) for text in texts]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD), vocabulary


class Encoder(nn.Module):
    """Reads texts `(batch, tokens)`, and sends its last state to the other rank."""

    def __init__(self, comm: tatami.comm.AbstractCommunicator, *, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, 32)
        self.rnn = create_multi_node_n_step_rnn(nn.GRU(32, 96, batch_first=True), comm, rank_out=1 - comm.rank)

    def forward(self, texts: torch.Tensor) -> None:
        lengths = (texts != PAD).sum(1)
        self.rnn(pack_padded_sequence(self.embedding(texts), lengths, batch_first=True, enforce_sorted=False))


class Decoder(nn.Module):
    """Begins with the state that the other rank sends."""

    def __init__(self, comm: tatami.comm.AbstractCommunicator, *, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, 32)
        self.rnn = create_multi_node_n_step_rnn(nn.GRU(32, 96, batch_first=True), comm, rank_in=1 - comm.rank)
        self.head = nn.Linear(96, tokens)

    def loss(self, texts: torch.Tensor) -> torch.Tensor:
        shifted = torch.cat([torch.full((len(texts), 1), END), texts[:, :-1]], 1)
        output, _ = self.rnn(self.embedding(shifted))
        return nn.functional.cross_entropy(self.head(output).transpose(1, 2), texts, ignore_index=PAD)

    def write(self, num_texts: int, *, longest: int) -> torch.Tensor:
        """Choose the most likely token at each step, `(num_texts, longest)`."""
        written = [torch.full((num_texts, 1), END)]
        output, state = self.rnn(self.embedding(written[0]))
        for step in range(longest):
            written.append(self.head(output).argmax(2))
            if step < longest - 1:
                output, state = self.rnn.rnn(self.embedding(written[-1]), state)
        return torch.cat(written[1:], 1)


def main() -> None:
    comm = tatami.init()
    if comm.size != 2:
        raise SystemExit(f"each encoder and its decoder are on different ranks: start this with 2 ranks, not {comm.size}")
    texts, vocabulary = encoded([words(number) if comm.rank == 0 else list(str(number)) for number in range(NUMBERS)])
    chance = torch.Generator().manual_seed(0)  # both ranks draw the same numbers
    order = torch.randperm(NUMBERS, generator=chance)
    test, train = order[:HELD_OUT], order[HELD_OUT:]
    torch.manual_seed(comm.rank)
    encoder, decoder = Encoder(comm, tokens=len(vocabulary)), Decoder(comm, tokens=len(vocabulary))
    model = nn.ModuleList([encoder, decoder])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for _ in range(EPOCHS):
        for numbers in torch.split(train[torch.randperm(len(train), generator=chance)], BATCH):
            optimizer.zero_grad()
            encoder(texts[numbers])
            functions.backward(decoder.loss(texts[numbers]))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    with torch.no_grad():
        encoder(texts[test])
        truth = texts[test]
        written = decoder.write(len(test), longest=truth.shape[1])
    exact = ((written == truth) | (truth == PAD)).all(1).double().mean().item()
    way = "digits to words" if comm.rank == 0 else "words to digits"
    example = " ".join(vocabulary[token] for token in written[0] if token > END)
    report = f"{way}: {exact:.1%} of {HELD_OUT} unseen numbers exact; {test[0]} is written {example!r}"
    reports = comm.allgather_object(report)
    if comm.rank == 0:
        print("\n".join(reports))
    assert exact > 0.95


main()
