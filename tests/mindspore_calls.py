"""Which scripts of MindSpore's model zoo find here what they use of its datasets.

    python tests/mindspore_calls.py                 # the share, and what others lack
    python tests/mindspore_calls.py zoo calls.tsv   # make the table from a checkout

`data/mindspore_calls.tsv` lists calls, one a line, and after an empty line each file of
github.com/mindspore-ai/models, at commit eab643f5 of 2023-07-17, that makes a dataset
with `mindspore.dataset`: its path, and the numbers of the calls that it has. A call is
written with the number of its arguments without a name, and the names of the others:
`.batch(1,drop_remainder)`. A method begins with a dot; a name alone is not called.
Modules of older versions count as their successors: `vision.c_transforms` as `vision`.
A call is here if it runs, on data of its own, with just these arguments.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from mindspore_files import unpack_mindrecords, write_cifar, write_mnist
from mindspore_peer import Points
from PIL import Image

HERE = Path(__file__).parent
TABLE = HERE / "data" / "mindspore_calls.tsv"

# What a file uses.

ROOT = "mindspore.dataset"
MERGED = ("engine", "datasets", "c_transforms", "py_transforms", "utils", "core")
"""Modules whose names were moved up."""
MODULES = ("", "config", "vision", "transforms", "text", "audio", "py_transforms_util")
METHODS = frozenset(
    (
        *("add_sampler", "apply", "batch", "bucket_batch_by_length", "build_vocab"),
        *("close", "concat", "create_dict_iterator", "create_tuple_iterator"),
        *("device_que", "filter", "flat_map", "get_batch_size", "get_class_indexing"),
        *(
            "get_col_names",
            "get_dataset_size",
            "get_repeat_count",
            "map",
            "num_classes",
        ),
        *("output_shapes", "output_types", "padded_batch", "project", "rename"),
        *("repeat", "reset", "save", "shuffle", "skip", "split", "sync_update"),
        *("sync_wait", "take", "to_json", "use_sampler", "zip"),
    )
)
"""What MindSpore's datasets have."""
GIVE = frozenset(
    (
        *("apply", "batch", "bucket_batch_by_length", "concat", "filter", "map"),
        *("padded_batch", "project", "rename", "repeat", "shuffle", "skip", "split"),
        *("take", "zip"),
    )
)
"""Those that return datasets."""


class Uses(ast.NodeVisitor):
    """Collects what a module uses of MindSpore's datasets.

    A variable is a dataset if somewhere in the module a dataset is stored in it, and so
    is what a function returns that returns one.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.found: set[str] = set()
        self._full: dict[str, str] = {}
        self._made: set[str] = set()
        for node in ast.walk(tree):
            self._read_import(node)
        while self._learn(tree):
            pass
        self.visit(tree)

    @property
    def makes_data(self) -> bool:
        """Whether it makes a dataset."""
        return any(call.split("(")[0].endswith("Dataset") for call in self.found)

    def _read_import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                module = alias.name if alias.asname else alias.name.split(".")[0]
                self._full[alias.asname or module] = module
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                self._full[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                self._add(f"{node.module}.{alias.name}", None)

    def _learn(self, tree: ast.Module) -> bool:
        """Find further datasets; return whether there were any."""
        before = len(self._made)
        for node in ast.walk(tree):
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and self._is_data(
                node.value
            ):
                targets = (
                    node.targets if isinstance(node, ast.Assign) else [node.target]
                )
                for target in targets:
                    several = target.elts if isinstance(target, ast.Tuple) else [target]
                    self._made.update(map(ast.unparse, several))
            elif isinstance(node, ast.FunctionDef) and any(
                isinstance(child, ast.Return) and self._is_data(child.value)
                for child in ast.walk(node)
            ):
                self._made.add(f"{node.name}()")
        return len(self._made) > before

    def _name(self, node: ast.AST) -> str:
        """Return the full name of what is imported; empty if it is something else."""
        if isinstance(node, ast.Name):
            return self._full.get(node.id, "")
        if isinstance(node, ast.Attribute) and self._name(node.value):
            return f"{self._name(node.value)}.{node.attr}"
        return ""

    def _is_data(self, node: ast.AST | None) -> bool:
        if isinstance(node, (ast.Name, ast.Attribute)):
            return ast.unparse(node) in self._made
        if isinstance(node, ast.IfExp):
            return self._is_data(node.body) or self._is_data(node.orelse)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._is_data(node.left) or self._is_data(node.right)
        if not isinstance(node, ast.Call):
            return False
        called, full = node.func, self._name(node.func)
        if isinstance(called, ast.Attribute) and called.attr in GIVE:
            return self._is_data(called.value) or full == f"{ROOT}.zip"
        by_us = isinstance(called, ast.Name) and f"{called.id}()" in self._made
        return by_us or (full.startswith(f"{ROOT}.") and full.endswith("Dataset"))

    def _add(self, full: str, call: ast.Call | None) -> None:
        if full.startswith(f"{ROOT}."):
            parts = full.removeprefix(f"{ROOT}.").split(".")
            head = [part for part in parts[:-1] if part not in MERGED]
            if head[:1] in (["vision"], ["transforms"]):
                head = [part for part in head if part != "transforms"] or ["transforms"]
            name = ".".join((*head, parts[-1]))
            if parts[-1] not in (*MODULES, *MERGED):
                self.found.add(name + arguments(call))

    def visit_Call(self, node: ast.Call) -> None:
        """Note a call, and not the name that it calls."""
        called, full = node.func, self._name(node.func)
        if full:
            self._add(full, node)
        elif isinstance(called, ast.Attribute) and self._is_data(called.value):
            if called.attr in METHODS:
                self.found.add(f".{called.attr}{arguments(node)}")
            self.visit(called.value)
        else:
            self.visit(called)
        for argument in (*node.args, *node.keywords):
            self.visit(argument)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Note a name that is not called."""
        full = self._name(node)
        if full:
            self._add(full, None)
        elif self._is_data(node.value) and node.attr in METHODS:
            self.found.add(f".{node.attr}")
        else:
            self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        """Note a loop."""
        if self._is_data(node.iter):
            self.found.add(".__iter__()")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Note a sum of datasets."""
        if self._is_data(node):
            self.found.add(".__add__(1)")
        self.generic_visit(node)


def arguments(call: ast.Call | None) -> str:
    """Return the number of arguments without a name, and the names of the others."""
    if call is None:
        return ""
    count = sum(not isinstance(argument, ast.Starred) for argument in call.args)
    names = sorted({keyword.arg for keyword in call.keywords if keyword.arg})
    return f"({','.join(([str(count)] if count else []) + names)})"


def extract(checkout: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the path and the calls of each file of a checkout that makes a dataset."""
    for path in sorted(checkout.rglob("*.py")):
        text = path.read_text(errors="replace")
        if "mindspore" not in text:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                uses = Uses(ast.parse(text))
        except SyntaxError:
            continue
        if uses.makes_data:
            called = {call.split("(")[0] for call in uses.found if "(" in call}
            plain = {call for call in uses.found if "(" not in call} - called
            calls = sorted(call for call in uses.found if "(" in call or call in plain)
            yield str(path.relative_to(checkout)), calls


def read_table(path: Path = TABLE) -> dict[str, list[str]]:
    """Return the calls of each file."""
    head, _, body = path.read_text().partition("\n\n")
    calls = head.splitlines()
    rows = (line.split("\t") for line in body.splitlines())
    return {name: [calls[int(at)] for at in places.split()] for name, places in rows}


def write_table(files: dict[str, list[str]], path: Path) -> None:
    """Write a table of the calls of each file, the most frequent first."""
    ordered = Counter(call for calls in files.values() for call in calls).most_common()
    number = {call: at for at, (call, _) in enumerate(ordered)}
    rows = [
        f"{k}\t{' '.join(str(number[call]) for call in v)}" for k, v in files.items()
    ]
    path.write_text("\n".join((*number, "", *rows)) + "\n")


# What is here.

Values = dict[str, Any]


class Here:
    """Runs calls on small data.

    Args:
        folder: an empty folder for files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._outcomes = folder, dict[str, bool]()
        self.errors: dict[str, str] = {}
        """What went wrong, by call."""
        write_data(folder)

    def __call__(self, call: str) -> bool:
        """Return whether a call is here."""
        if call not in self._outcomes:
            try:
                self._run(call)
                self._outcomes[call] = True
            except Exception as error:  # noqa: BLE001 whatever it is, it does not work
                self.errors[call] = f"{type(error).__name__}: {error}"
                self._outcomes[call] = False
        return self._outcomes[call]

    def _run(self, call: str) -> None:
        name, _, rest = call.rstrip(")").partition("(")
        keys = rest.split(",") if rest else []
        count = int(keys.pop(0)) if keys and keys[0].isdigit() else 0
        if name.startswith("."):
            self._run_method(name[1:], count, keys, called="(" in call)
            return
        target = self._found(name)
        if "(" not in call:
            return
        group = name.split(".")[0]
        values = self.operators if group in OPERATORS else self.datasets
        positional, keywords = values.get(name.split(".")[-1], ((), {}))
        usual = self.reading
        if group in OPERATORS:
            usual = {
                **KEYWORDS,
                **dict.fromkeys(("interpolation", "resample"), self._inter),
            }
        keywords = {**usual, **keywords}
        options = {key: keywords[key] for key in keys}
        if options.get("sampler") is not None:
            options |= dict.fromkeys({*options} & ORDER)
        instance = target(*positional[:count], **options)
        if group in OPERATORS:
            self._apply(name, instance)
        elif name.endswith("Dataset"):
            next(instance.create_tuple_iterator(num_epochs=1))
            instance.close()

    def _found(self, name: str) -> Any:
        target = self.ds
        for part in name.split("."):
            target = getattr(target, part)
        return target

    def _apply(self, name: str, operator: Any) -> None:
        """Run an operator on an image or a vector."""
        if not callable(operator):
            return
        pixels = np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3)
        vector = np.arange(4, dtype=np.int64)
        coded = np.fromfile(self._folder / "images" / "a" / "0.png", np.uint8)
        batch = (np.stack([pixels] * 2), np.eye(2, dtype=np.float32))
        inputs = ((pixels,), (Image.fromarray(pixels),), (coded,), (vector,), batch)
        inputs = (*inputs, ((pixels / 255).astype(np.float32),), (np.int64(1),))
        errors = []
        for values in inputs:
            try:
                operator(*values)
            except Exception as error:  # noqa: BLE001 the next may be what it takes
                errors.append(f"{type(error).__name__}: {error}")
            else:
                return
        raise ValueError(f"{name} takes no input: {errors}")

    def _run_method(
        self, name: str, count: int, keys: list[str], *, called: bool
    ) -> None:
        positional, keywords = self.methods.get(name, ((), {}))
        data = self.points
        if not called:
            getattr(data, name)
            return
        options = {key: keywords[key] for key in keys}
        if name == "map" and "input_columns" not in keys and count < 2:
            options |= {key: ["x"] for key in keys if key == "output_columns"}
        result = getattr(data, name)(*positional[:count], **options)
        for item in result if isinstance(result, list) else [result]:
            if isinstance(item, self.ds.Dataset):
                next(item.create_tuple_iterator(num_epochs=1))
                item.close()
            elif isinstance(item, Iterator):
                next(item)

    @cached_property
    def ds(self) -> Any:
        """The module that takes the place of MindSpore's."""
        return importlib.import_module("penstock.mindspore")

    @property
    def points(self) -> Any:
        """A dataset with two columns."""
        return self.ds.GeneratorDataset(Points(), ["x", "y"], shuffle=False)

    @property
    def reading(self) -> Values:
        """Arguments that most datasets have."""
        return {
            "num_parallel_workers": 2,
            "shuffle": True,
            "num_samples": 2,
            "num_shards": 1,
            "shard_id": 0,
            "sampler": self.ds.SequentialSampler(),
            "cache": self.ds.DatasetCache(1),
            "python_multiprocessing": False,
            "max_rowsize": 6,
            "usage": "train",
        }

    @property
    def datasets(self) -> dict[str, tuple[tuple[Any, ...], Values]]:
        """Arguments of datasets, samplers and settings: without names, with."""
        mind, tf = self._path("two.mindrecord0"), self._path("0.tfrecord")
        names, sampler = ["x", "y"], {"num_samples": 2}
        schema, both = self.ds.Schema(), self.ds.Schema()
        schema.add_column("ids", "int64", [2])
        both.add_column("x", "float32")
        both.add_column("y", "int64")
        source = {"source": Points(), "column_names": names, "schema": both}
        source["column_types"] = [np.float32, np.int64]
        array = np.arange(6).reshape(3, 2)
        return {
            "GeneratorDataset": ((Points(), names), source),
            "MindDataset": (
                (mind, ["label"], 2),
                {
                    "dataset_files": mind,
                    "dataset_file": mind,
                    "columns_list": ["label"],
                },
            ),
            "ImageFolderDataset": (
                (self._path("images"),),
                {
                    "dataset_dir": self._path("images"),
                    "class_indexing": {"a": 0},
                    "decode": True,
                    "extensions": [".png"],
                },
            ),
            "TFRecordDataset": (
                (tf, schema),
                {
                    "dataset_files": tf,
                    "schema": schema,
                    "columns_list": ["ids"],
                    "shard_equal_rows": True,
                },
            ),
            "Cifar10Dataset": (
                (self._path("cifar10"),),
                {"dataset_dir": self._path("cifar10")},
            ),
            "Cifar100Dataset": (
                (self._path("cifar100"),),
                {"dataset_dir": self._path("cifar100")},
            ),
            "MnistDataset": ((self._path("mnist"),), {}),
            "NumpySlicesDataset": (
                (array, ["x"]),
                {"data": array, "column_names": ["x"]},
            ),
            "PaddedDataset": (([{"x": array}],), {}),
            "zip": (((self.points, self.points.rename(names, ["a", "b"])),), {}),
            "DistributedSampler": (
                (2, 0, False),
                {"num_shards": 2, "offset": 0, **sampler},
            ),
            "RandomSampler": ((), {"replacement": True, **sampler}),
            "DatasetCache": ((), {"session_id": 1, "size": 0, "spilling": False}),
            "Schema": ((self._path("schema.json"),), {}),
            "set_numa_enable": ((True,), {}),
            "set_enable_shared_mem": ((False,), {}),
            "set_prefetch_size": ((2,), {}),
            "set_seed": ((1,), {}),
            "set_num_parallel_workers": ((2,), {}),
            "save": ((), {}),
        }

    @property
    def methods(self) -> dict[str, tuple[tuple[Any, ...], Values]]:
        """Arguments of methods: without names, with."""
        names, two = (
            ["x", "y"],
            {"num_parallel_workers": 2, "python_multiprocessing": False},
        )
        columns = {"input_columns": names, "output_columns": names}

        def same(*values: Any) -> Any:
            return values[:2] if isinstance(values[-1], self.ds.BatchInfo) else values

        pads = {"x": ([], 0)}
        return {
            "map": (
                (same, names, names),
                {
                    "operations": [same],
                    "column_order": ["y", "x"],
                    "cache": self.ds.DatasetCache(1),
                    "max_rowsize": 6,
                    **columns,
                    **two,
                },
            ),
            "batch": (
                (2, True, 2),
                {
                    "batch_size": 2,
                    "drop_remainder": True,
                    "per_batch_map": same,
                    "pad_info": pads,
                    **columns,
                    **two,
                },
            ),
            "padded_batch": ((2,), {"drop_remainder": True, "pad_info": pads}),
            "repeat": ((2,), {"count": 2}),
            "shuffle": ((4,), {"buffer_size": 4}),
            "project": ((names,), {"columns": names}),
            "rename": ((names, ["a", "b"]), {**columns}),
            "skip": ((1,), {"count": 1}),
            "take": ((1,), {"count": 1}),
            "filter": ((lambda x, y: True,), {"predicate": lambda x: True, **columns}),
            "split": (([0.5, 0.5],), {"randomize": False}),
            "concat": ((self.points,), {}),
            "__add__": ((self.points,), {}),
            "zip": ((self.points.rename(names, ["a", "b"]),), {}),
            "use_sampler": ((self.ds.SequentialSampler(),), {}),
            "apply": ((lambda data: data,), {}),
            "create_dict_iterator": ((1,), {"num_epochs": 1, "output_numpy": True}),
            "create_tuple_iterator": (
                (names,),
                {"num_epochs": 1, "output_numpy": True, "columns": names},
            ),
        }

    @cached_property
    def operators(self) -> dict[str, tuple[tuple[Any, ...], Values]]:
        """Arguments of operators: without names, with names of their own."""
        mean, flip = [0.5] * 3, lambda image: image
        return {
            "TypeCast": ((np.float32,), {}),
            "OneHot": ((10,), {}),
            "Compose": (([flip],), {}),
            "RandomApply": (([flip],), {}),
            "RandomChoice": (([flip],), {}),
            "PadEnd": (([6], 0), {}),
            "Slice": ((slice(2),), {}),
            "Fill": ((3,), {}),
            "Concatenate": (
                (),
                {"append": np.ones(1, np.int64), "prepend": np.ones(1, np.int64)},
            ),
            "Normalize": ((mean, mean), {}),
            "Rescale": ((1 / 255, 0.0), {}),
            "Decode": ((True,), {}),
            "Resize": ((16, self._inter), {}),
            "CenterCrop": ((16,), {}),
            "Crop": (((0, 0), 16), {}),
            "RandomCrop": ((16, 2), {}),
            "RandomResizedCrop": ((16,), {}),
            "RandomCropDecodeResize": ((16,), {}),
            "RandomHorizontalFlip": ((0.5,), {}),
            "RandomVerticalFlip": ((0.5,), {}),
            "RandomColorAdjust": ((0.4, 0.4, 0.4, 0.1), {}),
            "RandomRotation": ((10,), {}),
            "CutOut": ((4,), {}),
            "Pad": ((2,), {}),
            "RandomSelectSubpolicy": (([[(flip, 1.0)]],), {}),
        }

    @property
    def _inter(self) -> Any:
        try:
            return self._found("vision.Inter.BILINEAR")
        except (AttributeError, ImportError):
            return None

    def _path(self, name: str) -> str:
        return str(self._folder / name)


OPERATORS = ("vision", "transforms")
ORDER = {"shuffle", "num_samples", "num_shards", "shard_id"}
"""Arguments that a sampler excludes; scripts pass None for them."""
KEYWORDS: Values = {
    "size": 16,
    "mean": [0.5] * 3,
    "std": [0.5] * 3,
    "is_hwc": True,
    "prob": 0.5,
    "scale": (0.3, 1.0),
    "ratio": (0.75, 1.3),
    "max_attempts": 10,
    "brightness": 0.4,
    "contrast": 0.4,
    "saturation": 0.4,
    "hue": 0.1,
    "padding": 2,
    "degrees": (0.5, 1.5),
    "translate": (0.1, 0.1),
    "shear": 5,
    "threshold": (10, 100),
    "bits": 6,
    "length": 4,
    "num_patches": 1,
    "value": 0,
    "num_classes": 10,
    "alpha": 0.2,
    "dtype": "float32",
}


def write_data(folder: Path) -> None:
    """Write the files that calls read."""
    from mindspore_files import write_tfrecord

    (folder / "images" / "a").mkdir(parents=True)
    for at in range(2):
        picture = Image.new("RGB", (32, 24), (at * 90, 9, 9))
        picture.save(folder / "images" / "a" / f"{at}.png")
    write_mnist(folder / "mnist")
    for name, files, labels in (
        ("cifar10", ("data_batch_1.bin", "test_batch.bin"), 1),
        ("cifar100", ("train.bin", "test.bin"), 2),
    ):
        write_cifar(folder / name, files[0], labels)
        content = (folder / name / files[0]).read_bytes()
        (folder / name / files[1]).write_bytes(content[: 20 * (labels + 3072)])
    write_tfrecord(folder / "0.tfrecord", 0)
    unpack_mindrecords(HERE / "golden", folder)
    columns = {"ids": {"type": "int64", "shape": [2]}}
    (folder / "schema.json").write_text(json.dumps({"columns": columns}))


def lacking(here: Callable[[str], bool]) -> dict[str, list[str]]:
    """Return what each file uses that is not here."""
    return {
        path: [call for call in calls if not here(call)]
        for path, calls in read_table().items()
    }


def report(folder: Path) -> None:
    """Print the share, and what the other files lack."""
    here = Here(folder)
    gaps = lacking(here)
    whole = sum(not missing for missing in gaps.values())
    print(f"{whole} of {len(gaps)} files, {whole / len(gaps):.1%}, find all they use")
    missed = Counter(call for missing in gaps.values() for call in missing)
    alone = Counter(missing[0] for missing in gaps.values() if len(missing) == 1)
    print("\nfiles  it alone  call: what happens")
    for call, files in missed.most_common():
        print(f"{files:5}  {alone[call]:8}  {call}: {here.errors[call][:90]}")


def main() -> None:
    """Print the share, or make the table."""
    if len(sys.argv) > 2:
        write_table(dict(extract(Path(sys.argv[1]))), Path(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as name:
        report(Path(name))


if __name__ == "__main__":
    main()
