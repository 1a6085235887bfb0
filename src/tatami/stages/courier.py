"""Tensors on their way between stages while the rank computes.

MPI and TCP move a large message only while a thread at both ends looks after it. A rank that computes does not; so a thread of
its own does, as long as something is under way: it looks, sleeps a moment, and looks again. Torch lets other threads run while
it computes.

Tensors of a device pass through host memory: they are complete there before they leave, and go to the device of the rank that
waits for them.

Each tensor is preceded by a short message that says its shape and dtype and whether it requires a gradient, or that there is
none. The two have tags of their own,
so that several tensors of one kind can be expected at the same time; they arrive in the order in which they were sent.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tatami.comm.base import AbstractCommunicator, AbstractRequest
from tatami.comm.staging import is_on_host, to_host
from tatami.errors import CommTimeoutError, ModelError

_AXES = 8
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_AWAITED_S = 1e-3
"""Sleep between two looks while the rank waits for what is under way. A pipeline waits a third of its time: at 0.3 ms, four
hosts with 1.7 cores together spent 0.4 s of a core more in each iteration of 2 s, which took a tenth longer on 100 Mbit/s and
no less time on 1 Gbit/s;"""
_HIDDEN_S = 4e-3
"""and while it computes: a look takes 20 us of its core."""
_IDLE_S = 1.0
"""The thread ends when nothing was under way for so long."""


@dataclass(kw_only=True, eq=False)
class Arrival:
    """A tensor that is expected.

    Attributes:
        source, tag: whose, and which one.
        onward: the ranks to which it is sent on when it has come.
        header, payload: the two messages; the payload is asked for when the header has come.
        request: the message that is awaited.
        tensor: what came; None also where the sender has none.
        is_there: whether all of it has come.
        error: what went wrong.
    """

    source: int
    tag: int
    onward: Sequence[int]
    header: torch.Tensor
    request: AbstractRequest
    payload: torch.Tensor | None = None
    dtype: torch.dtype | None = None
    tensor: torch.Tensor | None = None
    is_there: bool = False
    error: BaseException | None = None


class Courier:
    """Sends and receives on one communicator, which nothing else uses.

    Args:
        comm: the ranks.
        wire: to what floating numbers are rounded on their way; None: they travel as they are.
    """

    def __init__(self, comm: AbstractCommunicator, *, wire: torch.dtype | None = None) -> None:
        self._comm, self._wire = comm, wire
        self._changed = threading.Condition()
        self._arrivals: list[Arrival] = []
        self._sending: list[tuple[AbstractRequest, torch.Tensor]] = []
        self._num_waiting = 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_over = False
        # A gradient that never came is still awaited when the program ends. After this MPI is finalized.
        atexit.register(_end, weakref.ref(self))

    def send(self, tensor: torch.Tensor | None, dest: int, *, tag: int) -> None:
        """Send without waiting; `tensor` must not change until it has left."""
        header = torch.zeros(_AXES + 3, dtype=torch.int64, device="cpu")
        messages = [(header, 2 * tag)]
        if tensor is not None:
            if tensor.dtype not in _DTYPES or tensor.dim() > _AXES:
                raise ModelError(
                    f"a tensor of {tensor.dtype} with {tensor.dim()} axes cannot be handed over to another stage: it may have "
                    f"at most {_AXES} axes, and an ordinary dtype. Cut the network elsewhere (layout=), or use one stage"
                )
            header[0], header[1] = 1 + _DTYPES.index(tensor.dtype), tensor.dim()
            header[2 : 2 + tensor.dim()] = torch.tensor(tensor.shape, dtype=torch.int64, device="cpu")
            header[-1] = tensor.requires_grad
            rounded = tensor.detach().to(self._sent_as(tensor.dtype))
            messages.append((rounded.contiguous() if is_on_host(rounded) else to_host(rounded), 2 * tag + 1))
        with self._changed:
            self._raise()
            self._sending += [(self._comm.isend(message, dest, tag=own), message) for message, own in messages]
            self._wake()

    def expect(self, source: int, *, tag: int, onward: Sequence[int] = ()) -> Arrival:
        """The next tensor of this tag from this rank; it may come, and be sent `onward`, while this rank computes."""
        header = torch.zeros(_AXES + 3, dtype=torch.int64, device="cpu")
        with self._changed:
            self._raise()
            request = self._comm.irecv(header, source, tag=2 * tag)
            arrival = Arrival(source=source, tag=tag, onward=onward, header=header, request=request)
            self._arrivals.append(arrival)
            self._wake()
        return arrival

    def wait(self, arrival: Arrival, what: str, *, sent: bool = False) -> torch.Tensor | None:
        """What came; with `sent`, wait only until it is on its way, which the first of its two messages says.

        Raises:
            CommTimeoutError: nothing did.
        """
        limit_s = self._comm.timeout_s
        with self._changed:
            if not self._waited_for(lambda: arrival.is_there or (sent and arrival.payload is not None)):
                raise CommTimeoutError(
                    f"rank {self._comm.rank} waited {limit_s:g} s for {what} from rank {arrival.source}, which has not sent "
                    "it. It is slow, has failed, or does something else"
                )
            self._raise()
        if arrival.tensor is not None and self._comm.device is not None:
            arrival.tensor = arrival.tensor.to(self._comm.device)
        return arrival.tensor

    def flush(self) -> None:
        """Wait until all that was sent has left.

        Raises:
            CommTimeoutError: it did not.
        """
        with self._changed:
            if not self._waited_for(lambda: not self._sending):
                raise CommTimeoutError(f"rank {self._comm.rank}: {len(self._sending)} messages to other stages did not leave")
            self._raise()

    def _waited_for(self, is_done: Callable[[], bool]) -> bool:
        """Whether it is done before the time is over, or an error came."""
        if is_done():
            return True
        self._num_waiting += 1
        self._changed.notify_all()
        try:
            return self._changed.wait_for(lambda: is_done() or self._error is not None, timeout=self._comm.timeout_s)
        finally:
            self._num_waiting -= 1

    def end(self) -> None:
        """Look after nothing any more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    # -- the thread -------------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._carry, name="tatami-courier", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _carry(self) -> None:
        with self._changed:
            while not self._is_over:
                try:
                    has_moved = self._look()
                except BaseException as error:  # shown by the thread that waits
                    self._error = error
                    self._thread = None
                    self._changed.notify_all()
                    return
                if has_moved:
                    self._changed.notify_all()
                elif self._arrivals or self._sending:
                    self._changed.wait(_AWAITED_S if self._num_waiting else _HIDDEN_S)
                elif not self._changed.wait_for(lambda: bool(self._arrivals or self._sending), timeout=_IDLE_S):
                    self._thread = None
                    return

    def _look(self) -> bool:
        """Whether anything has left or come."""
        left = [each for each in self._sending if not each[0].test()]
        has_moved = len(left) < len(self._sending)
        self._sending = left
        # In their order: a header that comes during this look must not be seen before the one that was sent before it, or the
        # payload that follows would be received, or sent on, as that of the other one.
        awaited = set[tuple[int, int, bool]]()
        for arrival in list(self._arrivals):
            step = (arrival.source, arrival.tag, arrival.payload is None)
            if step in awaited:
                continue
            if arrival.request.test():
                has_moved = True
                self._advance(arrival)
            else:
                awaited.add(step)
        return has_moved

    def _advance(self, arrival: Arrival) -> None:
        came, tag = (arrival.header, 2 * arrival.tag) if arrival.payload is None else (arrival.payload, 2 * arrival.tag + 1)
        self._sending += [(self._comm.isend(came, dest, tag=tag), came) for dest in arrival.onward]
        if arrival.payload is None:
            kind, axes, *shape, _ = arrival.header.tolist()
            if kind:
                arrival.dtype = _DTYPES[kind - 1]
                arrival.payload = torch.empty(shape[:axes], dtype=self._sent_as(arrival.dtype), device="cpu")
                arrival.request = self._comm.irecv(arrival.payload, arrival.source, tag=2 * arrival.tag + 1)
                return
        else:
            assert arrival.dtype is not None
            arrival.tensor = arrival.payload.to(arrival.dtype).requires_grad_(bool(arrival.header[-1]))
        arrival.is_there = True
        self._arrivals.remove(arrival)

    def _sent_as(self, dtype: torch.dtype) -> torch.dtype:
        is_wider = dtype.is_floating_point and self._wire is not None and dtype.itemsize > self._wire.itemsize
        return self._wire if is_wider and self._wire is not None else dtype


def _end(courier: weakref.ref[Courier]) -> None:
    found = courier()
    if found is not None:
        found.end()
