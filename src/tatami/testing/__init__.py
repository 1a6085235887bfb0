"""Test tools, shipped: worlds of ranks, slowed ranks, faults."""
