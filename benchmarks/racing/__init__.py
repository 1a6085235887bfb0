"""Tatami and what one would use instead, in the same processes: networks, cells of the grid, contestants, tables."""
