"""The kinds of workers: the trainer itself, threads, coroutines, processes."""
