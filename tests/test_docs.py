"""README and docs: code and commands run as they stand there, and links lead somewhere.

Commands run in the folder of a reader who has done the steps before. Those that cannot
run in a test are in one table, with the reason; their options exist.
"""

from __future__ import annotations

import ast
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import click
import pytest
import typer

import penstock as ps
from penstock import cli
from penstock.cache.housekeeping import entries
from support import warm
from support.doc_blocks import (
    BLOCK,
    FENCED,
    commands_of,
    commands_of_script,
    draw_given_photos,
    options_in,
    write_script,
)

ROOT = Path(__file__).parents[1]
PAGES = [
    page
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]
    if page.parts[-2][0] != "."
]
RUN = [page for page in PAGES if page.parent in (ROOT, ROOT / "docs")]
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of photographs that pages read, drawn once for all of them."""
    return draw_given_photos(tmp_path_factory.mktemp("drawn"))


@pytest.mark.parametrize(
    "page", [page for page in RUN if BLOCK.search(page.read_text())], ids=named
)
def test_the_code_of_a_page_runs_as_it_is(
    page: Path, photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "photos").symlink_to(photos)
    script = write_script(page, tmp_path)
    process = warm.run([sys.executable, *script], cwd=tmp_path, brief=True)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    prose = FENCED.sub("", page.read_text())
    missing = [
        link
        for link in LINK.findall(prose)
        if "://" not in link and not leads(page, link)
    ]
    assert missing == []


def leads(page: Path, link: str) -> bool:
    """Return whether a file, and a heading in it, exists."""
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    if not target.exists():
        return False
    headings = HEADING.findall(FENCED.sub("", target.read_text())) if anchor else []
    return not anchor or anchor in map(anchor_of, headings)


def anchor_of(heading: str) -> str:
    """Return what both GitHub and mkdocs make of a heading of plain words."""
    words = re.sub(r"[^\w\s-]", "", heading.lower())
    return re.sub(r"\s", "-", words.strip())


def test_the_site_tells_its_style_which_language_a_block_has() -> None:
    # Without that option no line of a log wraps.
    assert ".language-text" in (ROOT / "docs/style.css").read_text()
    assert "pygments_lang_class: true" in (ROOT / "mkdocs.yml").read_text()


# Commands

SCRIPTS = sorted(
    script
    for folder in ("benchmarks", "benchmarks/peers", "examples", "tests")
    for script in ROOT.glob(f"{folder}/*.py")
    if "__main__" in script.read_text()
    if "peers/serve" not in str(script)  # it runs where another loader is installed
)
WRITTEN = sorted(
    {
        command
        for page in [*PAGES, *ROOT.glob(".github/**/*.md")]
        if page.name != "CHANGELOG.md"  # it tells of options that are gone, too
        for command in commands_of(page)
    }
    | {command for script in SCRIPTS for command in commands_of_script(script)}
)
MORE = [
    "penstock --version",
    "penstock run -m train --epochs 2",
    "penstock report --name val out/run",
    "penstock watch --once out/run_0.jsonl",
    "penstock plan --name train --step-ms 5 --disk 1TB --data-size 9GB out/run",
    "penstock bench photos --seconds 4 --step-ms 1 --batch-size 8",
    "penstock demo --data photos --latency-ms 2 --seconds 5",
    "penstock cache clear --name NAME cache",
]
"""Commands with the options that no page shows."""
LEFT_OUT = {
    r"penstock (cache clear|plan|report|run|watch)": "a name, not a whole command",
    r"penstock watch PID": "it ends with the process: a test of its own runs it",
    r"make .*": "takes minutes, and installs packages; its goal exists",
    r"git clone .*|pip install.*": "needs a network; an extra that it names exists",
    r"pre-commit install": "changes the clone that is tested",
    r"(py-spy|pgrep) .*": "needs a process that hangs",
    r"while .*": "ends when a test fails",
    r"ray .*": "needs a cluster",
    r"python -m build .*": "needs a network; tests/test_layout.py builds a wheel",
    r"python -m venv .*|clean/bin/.*": "run by tests/test_installed.py",
    r"(\S+/)?python benchmarks/.*": "takes minutes; its options exist",
    r"cd benchmarks.*|python -m peers.*": "downloads 5 GB; its options exist",
    r"torchrun .*|python examples/.*": "run by tests/test_examples.py with few samples",
    r"python tests/.*": "takes minutes, or hours; its options exist",
}
"""What is not run as it is written, and why."""
SLOW = [
    "penstock bench my_module:make_loader",
    "penstock demo",
    "penstock demo --seconds 20",
    "penstock run examples/plain_training.py",
]
LAUNCHER = {"--standalone", "--nproc-per-node", "--max-restarts"}
TRAIN = """
import argparse, time
import torch
from torch.utils.data import DataLoader, Dataset

class Photos(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(0.001)  # a slow disk
        return torch.zeros(8), index

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=30)
epochs = parser.parse_args().epochs
train_loader = DataLoader(Photos(32), batch_size=4, shuffle=True)
val_loader = DataLoader(Photos(8), batch_size=4)
for epoch in range(epochs):
    for batch in train_loader:
        pass
    for batch in val_loader:
        pass
print("trained")
"""
MY_MODULE = """
from torch.utils.data import DataLoader
from train import Photos

def make_loader():
    return DataLoader(Photos(64), batch_size=8)
"""


def left_out(command: str) -> list[str]:
    """Return the rows of the table that a command matches."""
    return [row for row in LEFT_OUT if re.fullmatch(row, command)]


RUNNING = [command for command in WRITTEN if not left_out(command)]


def test_each_command_runs_or_is_left_out_for_one_reason() -> None:
    assert [command for command in RUNNING if not command.startswith("penstock ")] == []
    rows = [row for command in WRITTEN for row in left_out(command)]
    assert set(rows) == set(LEFT_OUT)
    assert len(rows) + len(RUNNING) == len(WRITTEN)
    assert set(SLOW) <= set(RUNNING)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    """Return a reader's folder: scripts, photographs, a log and a cache."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "train.py").write_text(TRAIN)
    (folder / "my_module.py").write_text(
        MY_MODULE.replace("from train", "from photos_of")
    )
    (folder / "photos_of.py").write_text(TRAIN.partition("parser =")[0])
    (folder / "photos").symlink_to(photos)
    (folder / "examples").symlink_to(ROOT / "examples")
    process = typed_in(folder, "penstock run --log out/run train.py --epochs 90")
    assert process.returncode == 0, process.stderr
    source = ps.Pipeline.from_folder(photos).cache(disk=folder / "cache")
    with source.map(ps.image.decode_random_resized_crop(8)).batch(16) as pipe:
        assert len(list(pipe)) == 4
    return folder


def typed_in(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of penstock, typed in a folder; what it prints may go to a file."""
    command, _, file = command.partition(" > ")
    process = warm.run(argv(command), cwd=folder, brief=True)
    if file:
        (folder / file).write_text(process.stdout)
    return process


def argv(command: str) -> list[str]:
    return [sys.executable, "-P", "-m", *command.split()]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.slow if command in SLOW else ())
        for command in [*RUNNING, *MORE]
    ],
)
def test_a_command_runs_as_it_is_written(
    command: str, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = shutil.copytree(kept, tmp_path / "here", symlinks=True)
    ((name, _),) = entries(folder / "cache")
    process = typed_in(folder, command.replace("NAME", name))
    assert process.returncode == 0, process.stderr
    assert (process.stdout + process.stderr).strip()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_a_process_is_watched_until_it_ends(
    ending: signal.Signals, kept: Path, tmp_path: Path
) -> None:
    training = argv(f"penstock run --log {tmp_path}/run train.py --epochs 999999")
    log = tmp_path / "run_0.jsonl"
    with ExitStack() as stack:
        run = stack.enter_context(warm.Popen(training, cwd=kept, stdout=-3, stderr=-3))
        stack.callback(run.kill)
        while not (log.exists() and '"event": "verdict"' in log.read_text()):
            assert run.poll() is None
            time.sleep(0.05)
        watch = argv(f"penstock watch {run.pid}")
        watching = stack.enter_context(
            warm.Popen(watch, cwd=kept, stdout=-1, text=True, brief=True)
        )
        stack.callback(watching.kill)
        assert watching.stdout is not None
        assert watching.stdout.readline().startswith("train: ")
        run.send_signal(ending)
        run.wait(timeout=60)
        output = watching.communicate(timeout=60)[0]
        assert ("(over)" in output) == (ending == signal.SIGINT)
        assert watching.returncode == 0


def commands(
    group: click.Command, name: str = "penstock"
) -> Iterator[tuple[str, click.Command]]:
    """Yield each command below one, with its name."""
    if not isinstance(group, click.Group):
        yield name, group
        return
    for word, command in group.commands.items():
        yield from commands(command, f"{name} {word}")


COMMANDS = dict(commands(typer.main.get_command(cli.app)))


@pytest.mark.parametrize("name", COMMANDS)
def test_each_option_is_used(name: str) -> None:
    options = {
        option
        for parameter in COMMANDS[name].params
        if isinstance(parameter, click.Option)
        for option in parameter.opts
    }
    commands = [command for command in [*RUNNING, *MORE] if command.startswith(name)]
    assert commands
    assert options <= {word for command in commands for word in command.split()}


def goals() -> set[str]:
    """Return each command of make, alone."""
    parts = [part for command in WRITTEN for part in re.split(" && |; ", command)]
    return {part for part in parts if part.startswith("make ")}


@pytest.mark.parametrize("command", sorted(goals()))
def test_a_goal_of_make_exists(command: str) -> None:
    _, *words = command.split()
    process = subprocess.run(
        [shutil.which("make") or "make", "-n", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr


def test_an_extra_that_is_to_be_installed_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(re.findall(r"'penstock\[(\w+)\]'", "\n".join(WRITTEN)))
    assert {"ray", "columnar"} <= extras <= set(project["optional-dependencies"])


def told_of(script: Path) -> set[str]:
    """Return the options of a script that its docstring and pages name."""
    call = named(script)
    if "peers" in script.parts:
        call = f"-m peers.{script.stem} ".replace(".__main__", "")
    about = [command for command in WRITTEN if call in f"{command} "]
    docstring = ast.get_docstring(ast.parse(script.read_text())) or ""
    return options_in("\n".join([docstring, *about])) - LAUNCHER


@pytest.mark.slow  # an interpreter for each
@pytest.mark.parametrize("script", [*filter(told_of, SCRIPTS)], ids=named)
def test_a_script_knows_the_options_that_are_told_of_it(script: Path) -> None:
    folder, call = ROOT, [str(script)]
    if "peers" in script.parts:
        folder = ROOT / "benchmarks"
        call = ["-m", f"peers.{script.stem}".removesuffix(".__main__")]
    process = warm.run([sys.executable, *call, "--help"], cwd=folder, brief=True)
    if "No module named" in process.stderr:
        pytest.skip(process.stderr.splitlines()[-1])
    help_text = process.stdout.partition("\noptions:\n")[2]
    assert told_of(script) <= options_in(help_text), process.stderr


ADVICE = re.compile(r"`penstock ([^`]+)`")


def texts(tree: ast.Module) -> Iterator[str]:
    """Yield the texts of a module without docstrings; FILLED is what is filled in."""
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [
                part.value if isinstance(part, ast.Constant) else "FILLED"
                for part in node.values
            ]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and id(node) not in bare:
            yield str(node.value)


def test_a_command_that_a_message_advises_has_what_it_needs(
    modules: dict[str, Path],
) -> None:
    advised = {
        advice
        for path in modules.values()
        for text in texts(ast.parse(path.read_text()))
        for advice in ADVICE.findall(text)
    }
    assert "run --log PREFIX train.py" in advised
    app = typer.main.get_command(cli.app)
    for advice in advised:
        command, words = app, advice.split()
        while isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        command.make_context(advice, words)  # raises UsageError
