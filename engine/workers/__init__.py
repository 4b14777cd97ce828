"""Workers in this process: the trainer itself, threads, coroutines."""
