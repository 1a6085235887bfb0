"""A clock that a test moves on."""


class HandClock:
    """Time passes when the test says so, and by `step_s` with every look."""

    def __init__(self, time_s: float = 100.0, *, step_s: float = 0.0) -> None:
        self.time_s, self.step_s = time_s, step_s

    def now_s(self) -> float:
        self.time_s += self.step_s
        return self.time_s

    def sleep(self, duration_s: float) -> None:
        self.time_s += duration_s
