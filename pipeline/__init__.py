"""What users write, and how it is compiled: README.md has the map."""

__all__: list[str] = []
