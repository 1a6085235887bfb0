"""Weights and optimizer state that change places: between ranks, mirrors and checkpoints."""
