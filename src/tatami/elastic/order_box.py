"""Where the two threads of a rank meet: Ray's threads hand in orders, and the script's thread parks and takes them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tatami.elastic.orders import Order
from tatami.errors import TrainingError
from tatami.membership import Halted, Restart

ORDER_TIMEOUT_S = 900.0
"""For so long a parked rank waits for orders: longer than anything that the run waits for itself."""


class OrderBox:
    """Orders of one rank, of which the last counts. A ticket that is older than another is about members that have changed.

    Args:
        name: of the rank, for the error.
        where: says where the script's thread has stopped, given the ticket of the order and whether the script has ended.
        sever: breaks all that the rank communicates by, and what it forms.

    Attributes:
        off: set where what the rank is doing is in vain; another one from order to order.
    """

    def __init__(self, name: str, *, where: Callable[[int, bool], Halted], sever: Callable[[], None]) -> None:
        self.off = threading.Event()
        self._name = name
        self._where = where
        self._sever = sever
        # Shared between the threads, under the condition:
        self._moved = threading.Condition()
        self._ticket = -1
        self._order: Order | None = None
        self._is_parked = False
        self._is_asked = False
        self._has_ended = False

    # -- for Ray's threads --------------------------------------------------------------------------------------------

    def halt(self, ticket: int, *, abort: bool) -> Halted | None:
        """Have the rank stop where it is (`abort`), or between two steps, and wait for it. None: another order came since."""
        with self._moved:
            if ticket < self._ticket:
                return None
            self._ticket = ticket
            self._order = None  # it was about members that have changed since
            self._is_asked = self._is_asked or not abort
        if abort:
            self._call_off()
        with self._moved:
            # No limit here: a rank that has not stopped `patience_s` after an abort is ended by the run; a rank
            # that is only asked stops at the end of its step, whose communication has a timeout.
            self._moved.wait_for(lambda: self._is_parked or self._has_ended or self._ticket > ticket)
            return None if self._ticket > ticket else self._where(ticket, self._has_ended)

    def hand_in(self, order: Order, *, ticket: int) -> None:
        """The script's thread carries it out when it is parked."""
        if isinstance(order, Restart) and ticket >= self._ticket:
            self._call_off()  # before the order is there: what is formed by it must not be broken
        with self._moved:
            if ticket < self._ticket:
                return
            self._ticket = ticket
            self._order = order
            self._moved.notify_all()

    def _call_off(self) -> None:
        self.off.set()
        self._sever()

    # -- for the script's thread --------------------------------------------------------------------------------------

    @property
    def is_asked(self) -> bool:
        """Whether the rank is to stop between two steps."""
        with self._moved:
            return self._is_asked

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def end(self) -> None:
        """The script has come to its end."""
        with self._moved:
            self._has_ended = True
            self._moved.notify_all()

    def park(self) -> Order:
        """Stop until there is an order; one to begin again stays in the box for `restart`."""
        with self._moved:
            self._is_parked = True
            self._moved.notify_all()
            order = self._await()
            if not isinstance(order, Restart):
                self._order = None
            self._is_parked = self._is_asked = False
            self.off = threading.Event()
            return order

    def restart(self) -> Restart:
        """Take the order to begin again; wait for it where it is not there yet."""
        with self._moved:
            order = self._order if isinstance(self._order, Restart) else self._await()
            if not isinstance(order, Restart):
                raise TrainingError(f"{self._name} expected to begin again, and was told {type(order).__name__}")
            self._order = None
            self.off = threading.Event()
            return order

    def _await(self) -> Order:
        """Under the condition; the order stays in place."""
        if not self._moved.wait_for(lambda: self._order is not None, timeout=ORDER_TIMEOUT_S):
            raise TrainingError(
                f"{self._name} has waited {ORDER_TIMEOUT_S:.0f} s for orders of the run after its communication broke; is the "
                "process that started the run alive?"
            )
        assert self._order is not None
        return self._order
