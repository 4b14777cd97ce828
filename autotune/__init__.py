"""The autotuner: observe, decide, apply, verify.

It sees a pipeline only through observations, and changes it only through knobs;
README.md has the map. Its parts are imported from their files, when they are used.
"""

__all__: list[str] = []
