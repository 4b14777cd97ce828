"""The root of the repository is the package; these tests keep that true."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

LOADED_WHEN_USED = {
    "fsspec",
    "lmdb",
    "psutil",
    "rich",
    "typer",
    "penstock.autotune.tuner",
    "penstock.cache.disk",
    "penstock.engine.engine",
}
"""Modules that imports leave unloaded; `benchmarks/engine_overhead.py` times them."""
FACES = "from penstock import DataLoader, Pipeline"
UNSAFE = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve", "subprocess"}
"""Modules that run whatever their input says, or another program."""
OWN_PIPES = {"penstock.engine.far.handover"}

# Ceilings. These figures only fall, but for what a deliverable adds, which is named
# here with its count. They began on 2026-11-29, when all packages had been read twice
# and 46 modules merged (docs/decisions/0015-whole-ideas-in-one-module.md). Since then:
# a close that does not wait for a listener of verdicts that never returns, 13; workers
# that collect garbage though they were forked while that was postponed, 13; blocks of
# a row of documents without a plan of all pieces 12, as it was before; Ray actors that
# end at SIGTERM, 3; an S3 connection for each coroutine, 2; what closes a dropped run
# closes a dropped cache, too: from pipeline to system, 13; what reviews of mends found,
# 12.
# Statements that a package of the root may have, docstrings included.
STATEMENTS = {
    "autotune": 3260,
    "cache": 2290,
    "demo": 206,
    "engine": 10405,
    "integrations": 159,
    "mindspore": 2600,
    "pipeline": 5433,
    "system": 589,
    "": 513,
}
# All modules, 20 of them MindSpore's names.
MODULES = 157
IMPORTED = 18
"""Modules of ours that a module may import, even where it does so late or for types."""


def test_no_module_of_ours_is_loaded_under_a_second_name(
    modules: dict[str, Path],
) -> None:
    import penstock  # noqa: F401 - there must be something to look at

    ours = set(modules.values())
    names = {
        name: Path(file).resolve()
        for name, module in sys.modules.copy().items()
        if (file := getattr(module, "__file__", None))
    }
    own_names = {name for name, path in names.items() if path in ours}
    assert "penstock" in own_names
    assert {name for name in own_names if name.split(".")[0] != "penstock"} == set()


def test_every_folder_of_code_is_a_package_that_ships(
    root: Path, packages: dict[str, Path]
) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["packages"] == sorted(packages)
    assert [p for p in packages.values() if not (p / "__init__.py").exists()] == []


def test_the_tests_are_not_part_of_the_package(root: Path) -> None:
    assert list((root / "tests").rglob("__init__.py")) == []
    assert not (root / "conftest.py").exists()


def test_inside_the_package_imports_are_relative(modules: dict[str, Path]) -> None:
    wrong = [
        f"{path}:{node.lineno}"
        for path in modules.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and not node.level)
        or isinstance(node, ast.Import)
        for name in imported_names(node)
        if is_within(name, "penstock")
    ]
    assert wrong == []


def test_only_messages_of_our_own_pipes_are_unpickled(modules: dict[str, Path]) -> None:
    unsafe_modules = {
        module
        for module, path in modules.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom | ast.Import) and unsafe(node))
        or (isinstance(node, ast.Call) and loads_files(node))
    }
    assert unsafe_modules == OWN_PIPES


def unsafe(node: ast.ImportFrom | ast.Import) -> bool:
    return any(name.split(".")[0] in UNSAFE for name in imported_names(node))


def loads_files(node: ast.Call) -> bool:
    """Return whether it is `torch.load` or numpy's `load`, which unpickle files."""
    return ast.unparse(node.func) in {"np.load", "numpy.load", "torch.load"}


def test_packages_stay_small(root: Path, modules: dict[str, Path]) -> None:
    sizes = dict.fromkeys(STATEMENTS, 0)
    for path in modules.values():
        tree = ast.parse(path.read_text())
        count = sum(isinstance(node, ast.stmt) for node in ast.walk(tree))
        *packages, _ = path.relative_to(root).parts
        sizes["".join(packages[:1])] += count
    large = {name: n for name, n in sizes.items() if n > STATEMENTS[name]}
    assert large == {}
    assert len(modules) <= MODULES


def test_modules_import_few_others(modules: dict[str, Path]) -> None:
    counts = {
        name: len(imported_modules(name, path, modules))
        for name, path in modules.items()
    }
    above = {name: n for name, n in counts.items() if n > IMPORTED}
    assert above == {}


def imported_modules(name: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """Return the modules of ours that a module imports, anywhere in it."""
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    imports = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            every = imported_names(node, package)
            imports |= {n if n in modules else n.rpartition(".")[0] for n in every}
    return imports


def test_import_loads_only_what_every_user_needs(tmp_path: Path) -> None:
    steps = ("import sys", "import penstock", "import torch.utils.data", FACES)
    code = "\n".join(f"{step}; print(*sys.modules)" for step in steps)
    loaded = [set(line.split()) for line in run_python(code, tmp_path).splitlines()]
    start, bare, torchs, faces = loaded
    assert "penstock" in bare
    assert "torch" not in bare  # `penstock report` and the like start at once
    assert LOADED_WHEN_USED & faces == set()
    for name in LOADED_WHEN_USED:  # the module exists
        assert importlib.util.find_spec(name) is not None

    ours = (bare - start) | (faces - torchs)
    others = {name.partition(".")[0] for name in ours}
    others -= sys.stdlib_module_names | {"penstock", "numpy"}
    assert [
        name for name in others if "cython" not in name
    ] == []  # numpy.random loads them


def test_the_wheel_holds_the_package_and_imports(
    root: Path, modules: dict[str, Path], tmp_path: Path
) -> None:
    unpacked = unpack(build_wheel(root, tmp_path), tmp_path / "site")
    shipped = {p.relative_to(unpacked / "penstock") for p in files(unpacked)}
    shipped -= {
        p for p in shipped if p.name.startswith("_photos.")
    }  # where the extension compiles
    sources = {p.relative_to(root) for p in modules.values()}
    report_files = ("page.html", "uplot.min.css", "uplot.min.js")
    data = {Path("py.typed"), *(Path("autotune/report", name) for name in report_files)}
    assert shipped == sources | data

    names = sorted(name for name in modules if name != "penstock.__main__")
    code = f"import {', '.join(names)}; print(penstock.__file__)"
    file = run_python(code, tmp_path, PYTHONPATH=str(unpacked)).strip()
    assert Path(file) == unpacked / "penstock" / "__init__.py"


def imported_names(node: ast.ImportFrom | ast.Import, package: str = "") -> list[str]:
    """Return the full names that `node`, in a module of `package`, imports."""
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.Import):
        return names
    above = package.split(".")[: len(package.split(".")) - node.level + 1]
    prefix = [*(above if node.level else []), *filter(None, [node.module])]
    return [".".join([*prefix, name]) for name in names]


def is_within(name: str, package: str) -> bool:
    """Return whether the module `name` is `package` or somewhere below it."""
    return name == package or name.startswith(f"{package}.")


def run_python(code: str, folder: Path, **environment: str) -> str:
    """Return what `code` prints when run in `folder` without writing bytecode."""
    variables = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | environment
    command = [sys.executable, "-c", code]
    return subprocess.check_output(command, cwd=folder, env=variables, text=True)


def build_wheel(root: Path, folder: Path) -> Path:
    """Build a wheel from a copy of the tree, as files in `build/` would ship too."""
    outputs = shutil.ignore_patterns(".*", "build", "dist", "site", "*.egg-info")
    shutil.copytree(root, folder / "source", ignore=outputs)
    code = "import sys; from setuptools.build_meta import *; build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=folder / "source",
        check=True,
        capture_output=True,
    )
    return next(folder.glob("penstock-*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    """Unpack a wheel as an installer does."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def files(site: Path) -> Iterator[Path]:
    """Return the files in site-packages that are not metadata of the distribution."""
    for path in site.rglob("*"):
        if path.is_file() and not path.relative_to(site).parts[0].endswith("-info"):
            yield path
