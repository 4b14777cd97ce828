"""An edit that changes a result changes its key; an edit that does not keeps it.

Projects are written to disk, edited at random places, and imported again as a new run
would; the keys of all runs are compared with what the functions returned in them.
"""

from __future__ import annotations

import importlib
import linecache
import os
import random
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cache import fingerprint as module
from penstock.cache.fingerprint import fingerprint
from penstock.pipeline.sources.files import find_files
from penstock.pipeline.sources.folder import Folder

FILES = {
    "edited_main.py": """
        {comment}
        import enum, functools
        from dataclasses import dataclass
        import numpy as np
        import edited_cfg as c, edited_cfg_2, edited_cfg_3, edited_tools, edited_lib
        from edited_star import *
        from edited_package.sub import inner as renamed
        import edited_editable
        {unused_import}
        ARRAY = np.arange(3) * {array}
        NAMES = {{{names}}}
        SETTINGS = {{"deep": [{{"factor": {deep}}}]}}
        MEMBERS = {{"a", "b", "{member}"}}
        BY_NAME, BY_TEXT = {by_globals}, {by_eval}
        SCALE = {scale}
        UNUSED = {unused}
        class Color(enum.Enum):
            RED = {red}
        @dataclass
        class Point:
            x: int = {point}
        class Base:
            def base(self, x): return x - {base}
        class Crop(Base):
            size = {attribute}
            def __init__(self, by): self.by = by
            def __call__(self, x): return self.base(x) * self.by + self.size + self.prop
            @property
            def prop(self): return {prop}
            @staticmethod
            def fixed(x): return x - {static}
            {unused_method}
        def decorated(factor):
            def around(function):
                @functools.wraps(function)
                def inner(x): return function(x) * factor
                return inner
            return around
        def clip(x, low=0, high=0): return max(x, low) - high
        def made(offset): return lambda x: x + offset
        def takes_module(x, module): return x * module.SIZE
        def train(model, lr={lr}):
            print("{log}", lr, UNUSED)
            model.optimise()
        class Model:
            width = {width}
        steps = [lambda x: x + {first}, lambda x: x * {second}]
        @functools.cache
        def remembered(x): return x + {cached}
        @functools.singledispatch
        def by_type(x): return x
        @by_type.register
        def _(x: int): return x + {dispatched}
        def op(x): return (x {sign} {constant}) % 1000
        def keyword(x): return clip(x, {which}=2)
        def defaults(x, y={default}, *, z={keyword_default}): return x * y - z
        def constant(x): return x * SCALE + c.SIZE
        def imports(x):
            from edited_tools import late
            import edited_cfg_2 as two
            return late(x) + two.LATER + edited_tools.helper(x)
        def dynamic(x):
            named = globals()["BY_NAME"] + eval("BY_TEXT")
            return getattr(edited_cfg_3, "WHOLE") + named
        def loaded(x): return importlib.import_module("edited_cfg_4").VALUE + x
        def text(x): return f"{{x:{format}}}{{str(x)!{conversion}}}"
        def several(x):
            return list(NAMES).index("a"), "c" in MEMBERS, ARRAY.sum(), Color.RED.value
        def nested(x):
            class Local:
                y = {local}
            return [Local.y + y for y in range(x) if y {compare} 1], SETTINGS["deep"][0]
        def library(x): return edited_lib.value(x) + edited_editable.value(x) + STAR
        import importlib
        FUNCTIONS = [
            op, keyword, defaults, constant, imports, dynamic, loaded, text, several,
            nested, library, renamed, remembered, by_type, Crop({instance}), Crop.fixed,
            made({cell}), functools.partial(takes_module, module=edited_cfg_3),
            functools.partial(clip, low={partial}), *steps, lambda x: Point().x + x,
            decorated({decorator})(op), Crop({bound}).__call__,
            made(edited_tools.helper(1)),
        ]
        {unused_function}
    """,
    "edited_cfg.py": "SIZE = {size}\nOTHER = {other}",
    "edited_cfg_2.py": "LATER = {later}\nOTHER = {other_2}",
    "edited_cfg_3.py": "WHOLE = {whole}\nSIZE = {passed}",
    "edited_cfg_4.py": "VALUE = {import_module}",
    "edited_star.py": "STAR = {star}\nOTHER = {other_3}",
    "edited_tools.py": """
        import edited_package.sub as s
        def helper(x): return deeper(x) + {helper}
        def deeper(x): return s.inner(x) * {deeper} + s.LEVEL
        def late(x): return x + {late}
        def unused(x): return {unused_helper}
    """,
    "edited_package/__init__.py": "",
    "edited_package/sub.py": "LEVEL = {level}\ndef inner(x): return x + {inner}",
    "edited_editable.py": "def value(x): return x * {editable}",
    "site-packages/edited_lib.py": """
        import edited_dependency
        def value(x): return x + {lib} + edited_dependency.value(x)
    """,
    "site-packages/edited_lib-0.dist-info/METADATA": "Name: edited-lib\nVersion: {lib}"
    "\nRequires-Dist: edited_dependency>=0; python_version > '3'",
    "site-packages/edited_lib-0.dist-info/top_level.txt": "edited_lib",
    "site-packages/edited_dependency.py": "def value(x): return x - {dependency}",
    "site-packages/edited_dependency-0.dist-info/METADATA": "Name: edited-dependency"
    "\nVersion: {dependency}",
    "site-packages/edited_dependency-0.dist-info/top_level.txt": "edited_dependency",
}
WORDS: dict[str, list[str]] = {
    "sign": ["+", "-", "*", "//", "|"],
    "which": ["low", "high"],
    "names": ['"a": 1, "b": 2', '"b": 2, "a": 1', '"c": 1, "a": 2, "b": 3'],
    "member": ["c", "d", "e"],
    "format": ["x", "04", "b"],
    "conversion": ["r", "s"],
    "compare": ["<", ">", "!=", ">="],
}
UNREACHED: dict[str, list[str]] = {
    "comment": ["", "# why", "# why\n\n\n# for that"],
    "unused_import": ["", "import json", "import torch.nn as nn"],
    "unused_function": ["", "def f(x): return x", "def g(x): return 1\nf = 3"],
    "log": ["loss", "step", "epoch"],
    "unused_method": ["", "# nothing", "# still nothing"],
    **{
        name: [str(number) for number in range(9)]
        for name in (
            "unused",
            "lr",
            "width",
            "other",
            "other_2",
            "unused_helper",
            "other_3",
        )
    },
}
TEXT = "".join(FILES.values())
NUMBERS = {
    name: [str(number) for number in range(1, 30)]
    for name in {
        part.partition("}")[0] for part in TEXT.replace("{{", "").split("{")[1:]
    }
    if name.isidentifier() and name not in WORDS | UNREACHED and name != "x"
}
REACHED = WORDS | NUMBERS


LONG = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    monkeypatch.syspath_prepend(tmp_path)
    module.packages.cache_clear()
    yield tmp_path
    forget()
    module.packages.cache_clear()


def forget() -> None:
    """Forget what was imported, as if in a new run."""
    for name in [name for name in sys.modules if name.startswith("edited_")]:
        del sys.modules[name]
    module.release.cache_clear()
    module.versions.cache_clear()
    importlib.invalidate_caches()
    linecache.clearcache()


def imported(project: Path, values: dict[str, str]) -> list[Any]:
    """Write the project, and return its functions as a new run imports them."""
    forget()
    for name, text in FILES.items():
        path = project / name
        path.parent.mkdir(exist_ok=True)
        lines = text.replace("\n        ", "\n").format_map(values).strip() + "\n"
        if not path.exists() or path.read_text() != lines:
            path.write_text(lines)
    functions: list[Any] = importlib.import_module("edited_main").FUNCTIONS
    return functions


def results_of(function: Any) -> str:
    return repr([function(x) for x in range(5)])


def run(project: Path, values: dict[str, str]) -> dict[str, tuple[bytes, str]]:
    """Return the key and the results of each function, as a new run finds them."""
    results = {}
    for at, function in enumerate(imported(project, values)):
        key = fingerprint([1], [("function", function)])
        assert key.private_because is None
        results[f"{at}"] = key.digest, results_of(function)
    return results


def edited(project: Path, rng: random.Random, edits: int) -> tuple[int, float]:
    """Return the number of stale keys, and the share kept by edits of unused code."""
    values = {name: rng.choice(some) for name, some in (REACHED | UNREACHED).items()}
    before = run(project, values)
    results: dict[tuple[str, bytes], str] = {}
    stale = kept_keys = cases = 0
    for _ in range(edits):
        is_reached = rng.random() < 0.75
        choices = REACHED if is_reached else UNREACHED
        name = rng.choice(sorted(choices))
        values[name] = rng.choice([v for v in choices[name] if v != values[name]])
        after = run(project, values)
        for number, (key, result) in after.items():
            stale += results.setdefault((number, key), result) != result
            cases += not is_reached
            kept_keys += not is_reached and key == before[number][0]
        before = after
    return stale, kept_keys / cases if cases else 1.0


@pytest.mark.parametrize("edits", [8, pytest.param(800, marks=LONG)], ids=str)
def test_no_edit_of_code_leaves_a_stale_key(project: Path, edits: int) -> None:
    stale, kept_share = edited(project, random.Random(edits), edits)
    assert stale == 0
    assert kept_share >= 0.9


@pytest.mark.long
def test_each_edit_of_code_in_use_changes_results_and_keys(
    project: Path,
) -> None:
    values = {name: some[0] for name, some in (REACHED | UNREACHED).items()}
    before = run(project, values)
    groups: list[tuple[set[str], dict[str, str]]] = []
    """Edits of which no two change the results of one function."""
    for name, some in REACHED.items():
        edit = {name: some[1]}
        after = map(results_of, imported(project, values | edit))
        numbers = {
            f"{n}" for n, result in enumerate(after) if result != before[f"{n}"][1]
        }
        assert numbers, f"{name} changes nothing"
        group = next((other for other in groups if not other[0] & numbers), None)
        if group is None:
            groups.append((numbers, edit))
        else:
            group[0].update(numbers)
            group[1].update(edit)
    for numbers, edits in groups:
        keys = run(project, values | edits)
        assert all(before[number][0] != keys[number][0] for number in numbers), edits


# Data


def touched(path: Path, content: str, at_s: float) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(content)
    os.utime(path, (at_s, at_s))


class Stores:
    """Files of equal sizes, in folders and archives, on servers; edited at random."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder = folder
        self.rng = rng
        self.clock_s = 1.7e9
        for split in ("train", "val"):
            for name in [f"{at % 2}/{at}.jpg" for at in range(20)]:
                touched(folder / split / name, f"{split:5} {name[2]:3}", 0)
            self.pack(split, 0)

    def pack(self, split: str, at_s: float) -> None:
        with zipfile.ZipFile(self.folder / f"{split}.zip", "w") as file:
            file.writestr("0.bin", str(self.rng.randrange(100, 999)))
        os.utime(self.folder / f"{split}.zip", (at_s, at_s))

    def edit(self) -> None:
        """Change a file but not its size; its time is its own, or an archive's."""
        self.clock_s += self.rng.choice([1e-3, 1.5])
        at_s = self.rng.choice([self.clock_s, 0, 1, 315_532_800, 1.6e9])
        split = self.rng.choice(["train", "val"])
        if at_s == 1.6e9:  # all files of an archive have one time
            for path in sorted((self.folder / split).glob("*/*.jpg")):
                touched(path, str(self.rng.randrange(10**8, 10**9)), at_s)
        elif self.rng.random() < 0.7:
            path = self.rng.choice(sorted((self.folder / split).glob("*/*.jpg")))
            touched(path, str(self.rng.randrange(10**8, 10**9)), at_s)
        else:
            self.pack(split, min(at_s, self.clock_s))

    def seen(self) -> Iterator[tuple[bytes, str]]:
        """Yield each key, and the content that it stands for."""
        for split in ("train", "val"):
            folder = Folder.scan(self.folder / split)
            url = str(self.folder / split / "*" / "*.jpg")
            archive = f"zip://0.bin::{self.folder / split}.zip"
            for data in (folder, find_files(url, None, None, "thread")):
                yield from keyed(data, [repr(data[at]) for at in range(len(data))])
            data = find_files([archive], None, None, "thread")
            with zipfile.ZipFile(self.folder / f"{split}.zip") as file:
                yield from keyed(data, [file.read("0.bin").decode()])
        for _ in range(2):
            host = f"{self.rng.choice('abc')}:{self.rng.choice('12')}"
            kind = self.rng.choice(["http", "ftp", "hdfs"])
            options = {"proxy": self.rng.choice("xyz")}
            data = find_files([f"{kind}://{host}/0.bin"], None, options, "thread")
            yield from keyed(data, [f"{kind} {host} {options}"])


def keyed(data: Any, contents: list[str]) -> Iterator[tuple[bytes, str]]:
    keys = fingerprint(data, [])
    for at, content in enumerate(contents):
        yield keys.key(at, None), content


@pytest.mark.parametrize("edits", [6, pytest.param(200, marks=LONG)], ids=str)
def test_no_edit_of_data_leaves_a_stale_key(tmp_path: Path, edits: int) -> None:
    stores = Stores(tmp_path, random.Random(edits))
    contents: dict[bytes, str] = {}
    for _ in range(edits):
        stores.edit()
        for key, content in stores.seen():
            assert contents.setdefault(key, content) == content
