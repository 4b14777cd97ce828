"""Where an engine runs: beside the trainer, or in a child of its own."""
