"""Copying batches to a CUDA device: on a stream of its own, ahead of the trainer."""
