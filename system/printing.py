"""How stages print: as the code that makes them."""

from __future__ import annotations

from typing import Any

__all__ = [
    "Bare",
    "call",
    "name_of",
]


def name_of(function: Any) -> str:
    """Return what the log calls a function."""
    name = getattr(function, "__name__", None) or type(function).__name__
    return "lambda" if name == "<lambda>" else str(name)


class Bare(str):
    """Text that prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def call(method: str, *args: object, **options: tuple[object, object]) -> str:
    """Print a method call, leaving out options that have their default."""
    given = [repr(arg) for arg in args]
    given += [
        f"{key}={value!r}"
        for key, (value, default) in options.items()
        if value != default
    ]
    return f"{method}({', '.join(given)})"
