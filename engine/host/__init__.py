"""What makes the batches of a run: an engine with its feed, or the trainer alone."""
