"""The evaluation of Ozawa, Sugaya and Aso, measured in labs: `python benchmarks/evaluation.py` runs it."""
