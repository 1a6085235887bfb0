"""Gradients weighed and summed at the parameters: the one engine of tiled models, DataParallel and MultiNodeOptimizer."""
