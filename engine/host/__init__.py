"""Where an engine runs: in the trainer's process, or in a child of its own."""
