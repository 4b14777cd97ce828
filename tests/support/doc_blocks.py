"""What a page tells its reader to run: Python as one script, and commands.

The script has the page's line numbers. Commands stand in blocks, and between backticks
in a sentence.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

from penstock.pipeline.testing import draw_photos

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^( *(?:```|~~~))([^\n]*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!^\| )`([^`\n]+)`", re.MULTILINE)
"""Code in a sentence. What begins the row of a table is a name."""
PROGRAMS = "cd git make penstock pgrep pip pre-commit py-spy python ray torchrun while"
COMMAND = re.compile(rf"(\S*/)?({PROGRAMS.replace(' ', '|')}) [^=]")
GIVEN = """
import numpy as np, torch
import penstock as ps
torch.set_num_threads(1)
dataset = torch.utils.data.TensorDataset(torch.rand(256, 8), torch.arange(256) % 4)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train_step(*batch): pass
"""
"""Names that pages may use without defining them, beside the folder `photos`."""


def draw_given_photos(folder: Path) -> Path:
    """Draw the photographs that pages read into `folder/photos`; return that folder."""
    return draw_photos(folder / "photos", 64, classes=4, size=(120, 90))


def script_of(page: Path) -> str:
    """Return a page's blocks at their own lines; all other lines are blank.

    Blocks that import a package that is not installed are left out: frameworks and file
    formats are extras.
    """
    text = page.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        if all(map(importlib.util.find_spec, imported(block[1]))):
            first = text.count("\n", 0, block.start(1))
            code = block[1].splitlines()
            lines[first : first + len(code)] = code
    return "\n".join(lines)


def imported(code: str) -> set[str]:
    """Return the top-level packages that a block imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


def write_script(page: Path, folder: Path) -> list[str]:
    """Write the script into a folder; return the arguments for Python to run it."""
    (folder / "given.py").write_text(GIVEN)
    path = folder / f"{page.stem}.py"
    path.write_text(f'exec(open("given.py").read());{script_of(page)}')
    return [str(path)]


def commands_of(page: Path) -> list[str]:
    """Return what a page tells its reader to type, without prompts and comments."""
    text = page.read_text(encoding="utf-8")
    blocks = [body for _, tag, body in FENCED.findall(text) if tag in ("", "console")]
    return typed("\n".join([*blocks, *SPAN.findall(FENCED.sub("", text))]))


def commands_of_script(script: Path) -> list[str]:
    """Return the commands in the docstring of a script."""
    return typed(ast.get_docstring(ast.parse(script.read_text("utf-8"))) or "")


def typed(text: str) -> list[str]:
    """Return the lines that are commands."""
    lines = text.replace("\\\n", " ").splitlines()
    bare = [re.sub(r"\s+# .*", "", line.strip().removeprefix("$ ")) for line in lines]
    return [" ".join(line.split()) for line in bare if COMMAND.match(line)]


def options_in(command: str) -> set[str]:
    """Return the long options that a command or a text names."""
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", command))
