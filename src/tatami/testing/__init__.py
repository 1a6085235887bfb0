"""Test tools, shipped: slowed ranks; worlds of ranks in `tatami.testing.worlds`, a pytest plugin; faults in `.faulty`."""

from tatami.testing.slowdown import Emulation, Slowdown, emulated_factors

__all__ = ["Emulation", "Slowdown", "emulated_factors"]
