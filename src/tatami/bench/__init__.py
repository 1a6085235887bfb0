"""Measurements of Tatami against what a user would run instead, interleaved in one run."""
