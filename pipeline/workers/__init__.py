"""The kinds of workers: the trainer itself, threads, processes."""

__all__: list[str] = []
