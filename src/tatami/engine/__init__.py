"""Ray as the engine of a run: started for it or found, its processes watched, and everything ended when the run ends."""
