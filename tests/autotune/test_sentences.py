"""Each sentence that the log and `explain()` can say stands in the documentation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = {"count", "size", "ms", "per_s", "short_name", "speedup"}
"""Functions of `phrases.py` that return a part of a sentence."""
DEFINED = (ast.FunctionDef, ast.Assign)
MORE: dict[str, set[str]] = {
    "autotune/causes.py": set(),
    "autotune/explain.py": {"line", "cache_advice", "of_torchs"},
    "autotune/log.py": {"failed", "_give_up"},
    "engine/observe/observation.py": {
        # of `Restriction`
        *("PINNED", "GIVEN", "ZERO", "SHORT", "SAMPLER", "CHANGES", "BELONGS"),
        *("DREW", "GRADIENTS", "FORKLESS", "MEMORY", "TRIED", "TRIED_MORE", "ALONE"),
    },
    "pipeline/compile/segments.py": {"MOVED", "STAYS"},
    "pipeline/dataloader.py": {"BYPASSED", "_loop", "_iterate", "_why_torchs"},
}
"""Where sentences are made, and by which functions and constants; all, if empty."""
FEW = 3
"""Words that identify a sentence."""


def plain(text: str) -> str:
    """Return a text as it is read: without markup and line breaks."""
    return re.sub(r"\s+", " ", re.sub(r"[`*]", "", text)).lower()


def pieces(node: ast.AST) -> Iterator[str]:
    """Yield what a text always says: the words between what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from re.split(r"\{[^}]*\}|%s", node.value)
    elif isinstance(node, ast.JoinedStr):
        for part in node.values:
            if isinstance(part, ast.Constant):
                yield str(part.value)


def longest(node: ast.AST) -> str:
    """Return the longest piece of the texts within a piece of code."""
    texts = [piece for part in ast.walk(node) for piece in pieces(part)]
    return max(texts, key=lambda piece: len(piece.split()), default="").strip(" .,:;")


def sentences() -> Iterator[str]:
    """Yield a piece of each sentence."""
    phrases = ast.parse((ROOT / "autotune/phrases.py").read_text())
    for node in phrases.body:
        if isinstance(node, ast.FunctionDef) and node.name not in PARTS:
            returns = [n for n in ast.walk(node) if isinstance(n, ast.Return)]
            yield longest(ast.Module([*returns], []))
    for module, names in MORE.items():
        for node in ast.walk(ast.parse((ROOT / module).read_text())):
            if isinstance(node, DEFINED) and named(node) & (names or named(node)):
                yield from texts_of(node)


def named(node: ast.FunctionDef | ast.Assign) -> set[str]:
    """Return what a piece of code defines."""
    if isinstance(node, ast.FunctionDef):
        return {node.name}
    return {target.id for target in node.targets if isinstance(target, ast.Name)}


def texts_of(node: ast.FunctionDef | ast.Assign) -> Iterator[str]:
    """Yield a piece of each sentence in a piece of code, without its documentation."""
    function = isinstance(node, ast.FunctionDef)
    docs = {ast.get_docstring(node, clean=False)} if function else set()
    for part in ast.walk(node):
        if isinstance(part, (ast.JoinedStr, ast.Constant)):
            text = longest(part)
            if len(text.split()) >= FEW and not docs & {getattr(part, "value", 0)}:
                yield text


SENTENCES = sorted({text for text in sentences() if len(text.split()) >= FEW})


def test_there_are_sentences() -> None:
    assert "Pipeline: threads take the GIL from the trainer; with" in SENTENCES
    assert "held up" not in SENTENCES


@pytest.mark.parametrize("sentence", SENTENCES)
def test_each_sentence_is_explained(sentence: str) -> None:
    page = plain((ROOT / "docs/reading_the_log.md").read_text())
    assert plain(sentence).strip() in page
