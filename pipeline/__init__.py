"""The engine: plans batches, loads them with workers that may change, hands them over.

README.md has the map.
"""

__all__: list[str] = []
