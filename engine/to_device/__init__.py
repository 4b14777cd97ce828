"""Batches to a CUDA device: over a stream of their own, some ahead of the trainer."""
