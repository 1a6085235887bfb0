"""When a call of `Trainer.fit` ends."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from tatami.errors import InputError
from tatami.inputs import check_finite
from tatami.units import parse_duration


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The first that is reached ends it; the same on all ranks.

    Attributes:
        epochs: passes over the data.
        iterations: updates.
        stop_below: a loss.
        max_time_s: by the clock of rank 0, after an update.
    """

    epochs: int | None = None
    iterations: int | None = None
    stop_below: float | None = None
    max_time_s: float | None = None

    @classmethod
    def of(
        cls,
        *,
        epochs: int | None,
        iterations: int | None,
        stop_below: float | None,
        max_time: str | float | timedelta | None,
    ) -> Limits:
        """
        Args:
            epochs, iterations, stop_below: as above.
            max_time: "90 min", seconds, or a `timedelta`.

        Raises:
            InputError: none is given, or an invalid one.
        """
        if epochs is None and iterations is None and stop_below is None and max_time is None:
            raise InputError("say when to stop: epochs, iterations, max_time or stop_below")
        if stop_below is not None:
            check_finite(stop_below, name="stop_below")
        for name, count in (("epochs", epochs), ("iterations", iterations)):
            if count is not None and count < 1:
                raise InputError(f"{name} must be at least 1, not {count}")
        seconds = None
        if max_time is not None:
            seconds = max_time.total_seconds() if isinstance(max_time, timedelta) else parse_duration(max_time)
            if seconds <= 0:
                raise InputError(f"max_time must be above 0, not {max_time}")
        return cls(epochs=epochs, iterations=iterations, stop_below=stop_below, max_time_s=seconds)
