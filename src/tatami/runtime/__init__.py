"""One iteration on one rank: phases, tensor-parallel sums, gradient sums, and what torch must be told of tiles."""
