"""The simulator held against what it simulates, in labs: `python benchmarks/simulated.py` runs it."""
