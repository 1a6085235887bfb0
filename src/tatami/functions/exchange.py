"""The one differentiable operation: a rank sends structures to some ranks and gets some, and gradients go back.

Every function of this package is an exchange, or an exchange and a sum. Backward is an exchange too: each message whose sender
waits for a gradient is answered, and the answer names the message. So no two can swap their gradients, and a backward pass can
itself be differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Never

import torch

from tatami.functions.chain import Chain
from tatami.functions.channel import Channel
from tatami.functions.inbox import Key, ReceivedMessage
from tatami.functions.joining import install
from tatami.functions.message import MessageKind, label_of, movable
from tatami.functions.peer_reports import OPERATIONS
from tatami.functions.structure import Packed, flat, packed

_INDEX_OF = {name: index for index, name in enumerate(OPERATIONS)}
# As plain numbers: members of an enum take longer to compare and to pack.
_POINT_TO_POINT, _COLLECTIVE, _ANSWER = int(MessageKind.POINT_TO_POINT), int(MessageKind.COLLECTIVE), int(MessageKind.ANSWER)


class Outgoing(NamedTuple):
    """What one peer is sent.

    Attributes:
        number: see `Head`.
        content: the structure.
        tensors: its leaves, as indices into the tensors of the exchange; a tensor may go to several peers.
    """

    peer: int
    number: int
    content: Packed
    tensors: Sequence[int]


class _Received(NamedTuple):
    """The part of a received message that is needed to answer it."""

    peer: int
    serial: int
    content: Packed


class Exchange:
    """One call of an operation on one rank.

    Attributes:
        name: of the operation, one of `OPERATIONS`.
        tag: of point-to-point messages; the root of a collective that has one, else 0.
        outgoing: what is sent, at most once to each peer.
        sources: peer and number of what comes, in the order in which it is returned.
        pattern: what every structure that comes must look like, where it must.
        same_shapes: whether shapes and dtypes must agree with the pattern too.
        arrived: the tensors that came, until they are recorded.
        received: what is needed to answer what came.
        chain: that it is on, once it is recorded.
        _asked: messages that want an answer, with their serials.
        _is_asked: whether something that came wants one.
    """

    __slots__ = (
        "_asked",
        "_chains",
        "_channel",
        "_is_asked",
        "_num_inputs",
        "arrived",
        "chain",
        "comm",
        "index",
        "kind",
        "location",
        "name",
        "outgoing",
        "pattern",
        "received",
        "same_shapes",
        "sources",
        "tag",
    )

    def __init__(
        self,
        channel: Channel,
        name: str,
        *,
        kind: int,
        tag: int,
        outgoing: Sequence[Outgoing],
        sources: Sequence[tuple[int, int]],
        location: bytes,
        pattern: Packed | None = None,
        same_shapes: bool = False,
    ) -> None:
        self.comm = channel.comm
        self.name = name
        self.kind = kind
        self.tag = tag
        self.outgoing = outgoing
        self.sources = sources
        self.location = location
        self.pattern = pattern
        self.same_shapes = same_shapes
        self.arrived: list[torch.Tensor] = []
        self.received: list[_Received] = []
        self.chain: Chain | None = None
        self.index = 0
        self._channel = channel
        self._chains = channel.chains
        self._num_inputs = 0
        self._asked: list[tuple[Outgoing, int]] = []
        self._is_asked = False

    # -- moving -------------------------------------------------------------------------------------------------------

    def move(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send all, then take all; autograd learns of it in `record`.

        Raises:
            CommTimeoutError: something did not come in time; says who waits for whom, and where.
            CommError: this or another rank found out that the ranks disagree.
            RankDiedError: a rank that is needed has ended.
        """
        channel, chain = self._channel, 0
        if self.kind != _ANSWER:
            chain = self._chains.number
            if self._chains.is_full and torch.is_grad_enabled():
                self._refuse_more()
        for out in self.outgoing:
            content = out.content
            serial = channel.send(
                out.peer,
                kind=self.kind,
                operation=_INDEX_OF[self.name],
                tag=self.tag,
                chain=chain,
                number=out.number,
                label=label_of(self.location, content, channel.chunk_bytes),
                tensors=[movable(tensors[index], channel.memory) for index in out.tensors],
                name=self.name,
            )
            if content.wants:
                self._asked.append((out, serial))
        if len(self.sources) > 1:
            for peer, _ in self.sources:
                channel.post(peer)
        for peer, number in self.sources:
            self._take(peer, number)

    def _refuse_more(self) -> Never:
        self._channel.fail(
            f"{self.name} on rank {self.comm.rank} at {self.location.decode()}: {self._chains.num_operations} operations on "
            "this communicator wait for a backward pass, and no more may. Run backward after each forward pass (a rank without "
            "a loss calls tatami.functions.backward()), communicate under torch.no_grad() where no gradient is needed, or send "
            "fewer, larger messages"
        )

    def _take(self, peer: int, number: int) -> None:
        kind = self.kind
        key: Key = (kind, self.tag if kind == _POINT_TO_POINT else 0, number)
        message = self._channel.take(peer, key, self._describe_wait)
        if kind == _COLLECTIVE:
            problem = self._channel.peer_reports.collective_problem(
                message, name=self.name, root=self.tag, location=self.location, mine=self.pattern, same_shapes=self.same_shapes
            )
            if problem is not None:
                self._channel.fail(problem)
        content = message.label.content
        if content.wants:
            if not torch.is_grad_enabled():
                _answer_zeros(self._channel, message)
            else:
                self._is_asked = True
                if kind != _ANSWER:
                    self._check_pass(message)
        self.received.append(_Received(peer, message.head.serial, content))
        self.arrived += message.tensors

    def _describe_wait(self, peer: int, waited_s: float) -> str:
        number = dict(self.sources)[peer]
        if self.kind == _ANSWER:
            what = f"the backward pass of {self.name}, for the gradient of what it sent to rank {peer}"
        elif self.kind == _COLLECTIVE:
            what = f"{self.name} (forward, collective {number}, root {self.tag})"
        else:
            what = f"{self.name} (forward, tag {self.tag}, message {number})"
        return f"rank {self.comm.rank} waits for rank {peer} in {what}, for {waited_s:.3g} s, at {self.location.decode()}"

    def _check_pass(self, message: ReceivedMessage) -> None:
        peer, reports, mine = message.peer, self._channel.peer_reports, self._chains.number
        if reports.passes[peer].agree(mine, message.head.chain):
            return
        problem = reports.pass_problem(
            peer, chain=mine, their_location=message.label.location, name=self.name, location=self.location
        )
        self._channel.fail(problem)

    # -- recording ----------------------------------------------------------------------------------------------------

    def record(
        self, tensors: Sequence[torch.Tensor], *, delegate: torch.Tensor | None = None, onto: Chain | None = None
    ) -> list[torch.Tensor]:
        """Put the exchange on a chain, if a gradient is wanted of anything; returns what arrived, as autograd knows it.

        The chain is `onto`, as long as that is in flight, else the current one.
        """
        is_wanted = self._asked or self._is_asked or (delegate is not None and delegate.requires_grad)
        if not (is_wanted and torch.is_grad_enabled()):
            return self.arrived
        chains = self._chains
        if not chains.in_flight:
            install()
        # The answers of a backward pass whose graph is wanted are part of the pass that they belong to.
        chain = onto if onto is not None and onto in chains.in_flight.values() else chains.current()
        for out, serial in self._asked:
            chain.first_serials.setdefault(out.peer, serial)
        self.chain = chain
        self._num_inputs = len(tensors)
        token: torch.Tensor
        outputs: list[torch.Tensor]
        token, *outputs = apply(self, chain.last, delegate, *tensors)
        # The outputs know this exchange through their graph; to know them here too would keep both alive.
        self.arrived = []
        self.index = chains.add(chain, token, self.location)
        return outputs

    def delegate(self) -> torch.Tensor:
        """A scalar zero through which backward comes to this exchange, and to all before it."""
        return torch.zeros((), dtype=torch.float32, device="cpu") if self.chain is None else self.chain.last

    # -- backward -----------------------------------------------------------------------------------------------------

    def gradients(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Answer what came with the gradients of what arrived, and wait for the answers to what was sent.

        Raises:
            CommError: backward did not begin at the end of the chain; and all that `move` raises.
        """
        chain = self.chain
        assert chain is not None
        chain.visit(self.index, name=self.name, location=self.location, comm=self.comm)
        outgoing, present = self._answers(grads)
        sources = [(out.peer, serial) for out, serial in self._asked]
        answers = Exchange(
            self._channel, self.name, kind=_ANSWER, tag=0, outgoing=outgoing, sources=sources, location=self.location
        )
        answers.move(present)
        is_differentiated = torch.is_grad_enabled()
        arrived = answers.record(present, onto=chain) if is_differentiated else answers.arrived
        result = self._sums(arrived, answers.received)
        if self.index == 0 and not is_differentiated:
            self._chains.close(chain)
            self._channel.refuse_unasked()
        return result

    def _answers(self, grads: Sequence[torch.Tensor | None]) -> tuple[list[Outgoing], list[torch.Tensor]]:
        outgoing: list[Outgoing] = []
        present: list[torch.Tensor] = []
        rest = iter(grads)
        for each in self.received:
            given = [(leaf, next(rest)) for leaf in each.content.leaves]
            if not each.content.wants:
                continue
            answer = [grad if leaf.wants else None for leaf, grad in given]
            content = flat(answer)
            start = len(present)
            present += [grad for grad in answer if grad is not None]
            outgoing.append(Outgoing(each.peer, each.serial, content, range(start, len(present))))
        return outgoing, present

    def _sums(self, answers: Sequence[torch.Tensor], received: Sequence[_Received]) -> list[torch.Tensor | None]:
        """For each tensor of the exchange the sum of its gradients, in the order of the peers; zeros where none came."""
        sums: list[torch.Tensor | None] = [None] * self._num_inputs
        present = iter(answers)
        for (out, _), each in zip(self._asked, received, strict=True):
            for index, leaf, answer in zip(out.tensors, out.content.leaves, each.content.spec, strict=True):
                so_far = sums[index]
                if answer is not None:
                    grad = next(present)
                    sums[index] = grad if so_far is None else so_far + grad
                elif leaf.wants and so_far is None:
                    sums[index] = torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu")
        return sums


def _answer_zeros(channel: Channel, message: ReceivedMessage) -> None:
    """Nothing of `message` will reach a loss here: autograd is off."""
    channel.send(
        message.peer,
        kind=_ANSWER,
        operation=message.head.operation,
        tag=0,
        chain=0,
        number=message.head.serial,
        label=label_of(message.label.location, packed((None,) * len(message.label.content.leaves)), channel.chunk_bytes),
        tensors=(),
    )


_ZERO = torch.zeros((), dtype=torch.float32, device="cpu")
"""What tokens are copied from, faster than making new ones. Each has its own memory, because users may add to delegates."""


class _Exchanged(torch.autograd.Function):
    """What autograd sees of an exchange that has taken place: tokens chain it to the one before and the one after."""

    @staticmethod
    def forward(
        exchange: Any,
        token: torch.Tensor,  # noqa: ARG004 -- makes this exchange depend on the one before
        delegate: torch.Tensor | None,  # noqa: ARG004
        *tensors: torch.Tensor,  # noqa: ARG004
    ) -> tuple[torch.Tensor, ...]:
        return (_ZERO.clone(), *exchange.arrived)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.exchange = exchange = inputs[0]
        ctx.set_materialize_grads(False)
        if exchange.received and not all(each.content.wants_all for each in exchange.received):
            leaves = [leaf for each in exchange.received for leaf in each.content.leaves]
            constant = [tensor for tensor, leaf in zip(output[1:], leaves, strict=True) if not leaf.wants]
            ctx.mark_non_differentiable(*constant)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, None, None, *ctx.exchange.gradients(grads[1:]))


# `Function.apply` inspects the signature of `forward` on every call, for 20 us, and then calls this.
apply: Any = super(torch.autograd.Function, _Exchanged).apply
