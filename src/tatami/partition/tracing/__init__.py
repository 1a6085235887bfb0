"""Finding the blocks of a network: its modules as programs, their axes of units, and the proof on a sample batch."""
