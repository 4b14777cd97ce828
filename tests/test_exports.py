"""Each package exports what its `__all__` says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import penstock


def test_every_exported_name_resolves(modules: dict[str, Path]) -> None:
    missing = [
        f"{module.__name__}.{name}"
        for module in loaded(modules)
        for name in exports(module)
        if not hasattr(module, name)
    ]
    assert missing == []


def test_exports_are_sorted(modules: dict[str, Path]) -> None:
    unsorted = [
        module.__name__
        for module in loaded(modules)
        if exports(module) != sorted(exports(module), key=as_ruff_sorts)
    ]
    assert unsorted == []


def test_the_root_exports_exactly_its_public_names() -> None:
    public = {
        name
        for name, value in vars(penstock).items()
        if not name.startswith("_") and not is_bystander(name, value)
    }
    exported = {name for name in penstock.__all__ if not name.startswith("_")}
    assert public <= exported
    assert exported - public <= set(dir(penstock))


def is_bystander(name: str, value: object) -> bool:
    """Return whether it is in the root only because something imported it."""
    if isinstance(value, ModuleType):
        return name not in penstock.__all__ and value.__name__ == f"penstock.{name}"
    return name == "annotations"  # it comes from __future__


def loaded(modules: dict[str, Path]) -> list[ModuleType]:
    """Import and return all modules."""
    return [importlib.import_module(name) for name in modules]


def exports(module: ModuleType) -> list[str]:
    """Return its `__all__`, or nothing."""
    return list(getattr(module, "__all__", []))


def as_ruff_sorts(name: str) -> tuple[int, list[str | int]]:
    """Sort constants first, then classes, then the rest (ruff's rule RUF022).

    Numbers in names count as numbers: `Cifar10Dataset` comes before `Cifar100Dataset`.
    """
    parts = re.split(r"(\d+)", name)
    key = [int(part) if part.isdigit() else part for part in parts]
    if name.isupper():
        return 0, key
    return (1 if name[0].isupper() else 2), key
