"""What users write, and compiling it into what the engine runs; README.md has the map."""

__all__: list[str] = []
