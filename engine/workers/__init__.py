"""The kinds of workers: the trainer itself, threads, processes."""
