"""Tiled runs on Ray whose members die, leave and join: the survivors repair the run, and go on with the same numbers."""
