"""The kinds of workers: the trainer itself, threads, processes."""

from __future__ import annotations

__all__: list[str] = []
