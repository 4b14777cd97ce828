"""Rows of a file of JSON lines that another thread or process may still write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def rows_in(path: Path) -> list[dict[str, Any]]:
    """Return the rows of all lines that are complete; none without a file."""
    text = path.read_text(errors="replace") if path.exists() else ""
    *lines, _unfinished = text.split("\n")
    return [json.loads(line) for line in lines]
