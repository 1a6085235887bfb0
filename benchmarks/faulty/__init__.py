"""Elastic runs in a lab, undisturbed and under faults: what `benchmarks/faults.py` is made of."""
