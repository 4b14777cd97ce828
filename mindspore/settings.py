"""Settings, and small objects that scripts pass to datasets."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from .. import config as _config
from ..errors import check

LOGGER = logging.getLogger("penstock")
# What MindSpore has, and what to use.
INSTEAD = {
    "BatchDataset": "GeneratorDataset(...).batch(n)",
    "CSVDataset": "GeneratorDataset of rows read with csv or pandas",
    "CelebADataset": "GeneratorDataset of torchvision.datasets.CelebA",
    "CLUEDataset": "TextFileDataset, and a map() with json.loads",
    "DistributedDataset": "num_shards and shard_id",
    "GraphData": "a library for graphs, such as PyTorch Geometric",
    "RepeatDataset": "GeneratorDataset(...).repeat(n)",
    "audio": "functions of your own in map()",
    "deserialize": "penstock.Pipeline.load_autotune(path) for tuned settings",
    "text": "functions of your own in map(), or penstock.text",
}
SETTINGS = {
    "load": "Pipeline.load_autotune(path)",
    "set_callback_timeout": "map(timeout=...)",
    "set_error_samples_mode": "batch(on_error='substitute')",
    "set_multiprocessing_timeout_interval": "map(timeout=...)",
}
# Settings of MindSpore's own engine.
MEANINGLESS = frozenset(
    (
        "auto_num_workers",
        "auto_offload",
        "debug_mode",
        "dynamic_shape",
        "enable_shared_mem",
        "enable_watchdog",
        "fast_recovery",
        "monitor_sampling_interval",
        "numa_enable",
        "sending_batches",
        "video_backend",
    )
)


def instead(name: str, table: dict[str, str]) -> str:
    """Return the error that there is no such call, with the equivalent."""
    call = table.get(name)
    cure = f"use {call}" if call else "see penstock.Pipeline for what there is"
    return f"penstock.mindspore has no {name!r}; {cure}"


@cache
def note(name: str, why: str) -> None:
    """Log once that something has no effect."""
    LOGGER.warning("%s has no effect: %s", name, why)


def ignored(method: str, options: dict[str, Any], *names: str) -> None:
    """Refuse options that would change what is loaded, but for `names`, which do not.

    Raises:
        SpecError: there is another one.
    """
    for name, value in options.items():
        check(
            name in names,
            f"`{name}` is not an option of {method}() here, got {value!r}; leave it"
            " out, or use the penstock.Pipeline inside (`.pipeline`)",
        )
        if name == "cache" and value is not None:
            note("DatasetCache", "use penstock.Pipeline.cache(ram=..., disk=...)")


class Config:
    """MindSpore's `config`: the settings that penstock has under the same name.

    Settings of MindSpore's engine are kept, and change nothing.
    """

    NAMES: ClassVar = {name for name in _config.__all__ if "budget" not in name}

    def __init__(self) -> None:
        self._settings: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        verb, _, setting = name.partition("_")
        if name in self.NAMES:
            return getattr(_config, name)
        if verb not in ("set", "get") or setting not in MEANINGLESS:
            raise AttributeError(instead(name, SETTINGS))
        return (
            self._set(setting) if verb == "set" else lambda: self._settings.get(setting)
        )

    def _set(self, setting: str) -> Callable[[Any], None]:
        def keep(value: Any) -> None:
            note(f"config.set_{setting}", "penstock decides that itself")
            self._settings[setting] = value

        return keep


class Shuffle(Enum):
    """How much of files of records to shuffle."""

    GLOBAL = "global"
    FILES = "files"
    INFILE = "infile"


class DatasetCache:
    """Accepted, and ignored with a note: penstock's caches need no server."""

    def __init__(self, session_id: int, size: int = 0, **options: Any) -> None:
        self.session_id, self.size, self.options = session_id, size, options


class Schema:
    """Types and shapes of columns.

    Args:
        schema_file: a JSON file with `columns`, and perhaps `numRows`.
    """

    def __init__(self, schema_file: str | os.PathLike[str] | None = None) -> None:
        content = json.loads(Path(schema_file).read_text()) if schema_file else {}
        columns = content.get("columns", {})
        if isinstance(columns, list):
            columns = {column["name"]: column for column in columns}
        # The number of rows to read; None: all.
        self.rows: int | None = content.get("numRows")
        # Type and shape of each column.
        self.columns: dict[str, dict[str, Any]] = {}
        for name, column in columns.items():
            self.add_column(name, column["type"], column.get("shape"))

    def add_column(
        self, name: str, de_type: Any, shape: Sequence[int] | None = None
    ) -> None:
        """Add a column.

        Args:
            name: its name.
            de_type: its type: a name, or a type of numpy, torch or MindSpore.
            shape: its shape, where one size may be -1; None: as it comes.
        """
        kind = getattr(de_type, "__name__", str(de_type)).rsplit(".", 1)[-1].lower()
        self.columns[name] = {"type": kind, "shape": shape}

    def to_json(self) -> str:
        """Return the columns as JSON."""
        columns = [{"name": name, **column} for name, column in self.columns.items()]
        return json.dumps({"columns": columns}, indent=2)
