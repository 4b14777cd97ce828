"""One word for one thing: names use the terms of the field."""

from __future__ import annotations

import ast
import functools
import io
import keyword
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

REPLACED = {
    "account": "reservations",
    "bury": "reap",
    "crew": "worker pool",
    "dismiss": "stop",
    "flight": "in-flight batch",
    "gate": "engine lock",
    "hands": "status page",
    "hire": "start",
    "hold": "backoff",
    "holds": "backoffs",
    "LEAST": "MIN",
    "meeting": "arena registry",
    "MOST": "MAX",
    "neighbour": "host peer",
    "neighbours": "host peers",
    "nursery": "fork server",
    "park": "suspend",
    "poke": "notify",
    "purse": "byte budget",
    "roster": "worker pool",
    "rouse": "resume",
    "template": "fork server",
    "turn": "lookup",
}
"""Words that no outsider would search for, and what the code says instead."""
COMPOUNDS = ("in_flight", "InFlight")
"""Compounds that count as one word."""
NO_CODE = {"build", "dist", "docs"}
UNIDIOMATIC = (
    r"(?i)\banew\b|\bfor ever\b|\bgate's lock\b|\b(?:that|those) of the one\b"
    r"|\bfiles end here\b|\bwho looked through\b|\bwho has it\b"
)
"""Phrases that read as translated, or make sense to their author alone."""
IN_PROSE = (
    r"(?i)\b(?:is|are|was|were|be) told\b(?! apart)|\bin hand\b|\bdata sets?\b"
    r"|\bhanded on\b|\ball else\b|\bbur(?:y|ies|ied)\b|\bcrews?\b|\bdismiss"
    r"|\bgates?\b|\bhir(?:es?|ed|ing)\b|\bneighbou?rs?\b|\bnurser(?:y|ies)\b"
    r"|\bpark(?:s|ed|ing)?\b|\bpok(?:es?|ed|ing)\b|\bpurses?\b|\brosters?\b"
    r"|\brous(?:es?|ed|ing)\b"
)
"""More of these, and the replaced words that have no other meaning in our texts."""


def words(name: str) -> list[str]:
    """Split at `_` and capitals: `EngineLock` and `engine_lock` alike."""
    for compound in COMPOUNDS:
        name = name.replace(compound, "")
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return [part if part.isupper() else part.lower() for part in parts]


def names(path: Path) -> Iterator[str]:
    """Yield the identifiers of a file. Those of tests are sentences, and left out."""
    text = io.StringIO(path.read_text(encoding="utf-8"))
    for token in tokenize.generate_tokens(text.readline):
        is_name = token.type == tokenize.NAME and not keyword.iskeyword(token.string)
        if is_name and not token.string.startswith("test_"):
            yield token.string


@functools.cache
def replaced(name: str) -> set[str]:
    """Return the words of an identifier that others have taken the place of."""
    split = words(name)
    folded = {word.lower() for word in split if not word.isupper() or len(split) == 1}
    return REPLACED.keys() & ({*split} | folded)


def texts(root: Path) -> Iterator[tuple[str, str]]:
    """Yield all code and prose, but for the lists of words that were replaced."""
    for path in [*root.glob("*.*"), *root.glob("[!.]*/**/*.*")]:
        inside = path.relative_to(root)
        ours = path.suffix in {".py", ".md"} and inside.parts[0] not in {
            "build",
            "dist",
        }
        if ours and path.name not in {"renamed.md", "test_words.py"}:
            yield str(inside), path.read_text(encoding="utf-8")


def test_no_name_uses_a_word_that_was_replaced(root: Path) -> None:
    places = {
        f"{path.relative_to(root)}: {name} (say {REPLACED[word]})"
        for path in root.glob("[!.]*/**/*.py")
        if path.relative_to(root).parts[0] not in NO_CODE
        if any(map(replaced, {*re.findall(r"\w+", path.read_text()), path.stem}))
        for name in {*names(path), path.stem}
        for word in replaced(name)
    }
    assert places == set()


def test_a_word_is_found_wherever_it_stands_in_a_name() -> None:
    assert replaced("_purse") == {"purse"}
    assert replaced("EngineGate") == {"gate"}
    assert replaced("MOST_LINES") == {"MOST"}
    for name in ("batches_in_flight", "InFlightBatch", "at_most", "holder"):
        assert replaced(name) == set()


def test_no_text_reads_as_if_translated(root: Path) -> None:
    passages = [
        f"{name}: {match.group()}"
        for name, text in texts(root)
        for match in re.finditer(UNIDIOMATIC, text)
    ]
    assert passages == []


def test_pages_read_as_english_and_use_no_word_that_was_replaced(root: Path) -> None:
    pages = [
        *root.glob("*.md"),
        *root.glob("[!.]*/**/*.md"),
        *root.glob(".github/**/*.md"),
    ]
    passages = [
        f"{page.relative_to(root)}: {match.group()}"
        for page in pages
        if page.name != "renamed.md"
        for match in re.finditer(IN_PROSE, page.read_text())
    ]
    assert passages == []


def written(root: Path) -> Iterator[Path]:
    """Yield the modules whose prose is checked."""
    for path in [*root.glob("*.py"), *root.glob("[!.]*/**/*.py")]:
        if path.relative_to(root).parts[0] not in NO_CODE:
            yield path


def test_docstrings_comments_and_messages_read_as_english_too(root: Path) -> None:
    passages = [
        f"{path.relative_to(root)}: {match.group()}"
        for path in written(root)
        if path.name != "test_words.py"
        if re.search(IN_PROSE, unwrapped(path.read_text(encoding="utf-8")))
        for text in prose(path.read_text(encoding="utf-8"))
        for match in re.finditer(IN_PROSE, text)
    ]
    assert passages == []


def test_prose_is_found_across_lines_and_told_from_code() -> None:
    code = '"""All\n    else."""\nall_else = 1  # and all\n# else\nf"all {x} else"\n'
    assert [*prose(code)] == [" and all else", "All else.", "all ", " else"]
    assert re.search(IN_PROSE, "which can be told apart") is None


HEADLESS = r"(?:Of|(?:At|By|From|In|To) which|That)\b"
"""How a docstring begins that leaves out its own noun: a number "Of the tier."."""


def test_docstrings_name_what_they_describe(root: Path) -> None:
    docstrings = [
        f"{path.relative_to(root)}:{node.lineno}: {node.value.value[:40]}"
        for path in written(root)
        if re.search('"""' + HEADLESS, text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if re.match(HEADLESS, str(node.value.value))
    ]
    assert docstrings == []


def prose(code: str) -> Iterator[str]:
    """Yield comments, those of consecutive lines as one, and then all strings."""
    comments: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            line, text = token.start[0], token.string.lstrip("# ")
            comments[line] = f"{comments.pop(line - 1, '')} {text}"
    yield from comments.values()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield unwrapped(node.value)


def unwrapped(text: str) -> str:
    """Return a text on one line, without the marks of comments."""
    return re.sub(r"\s*\n[\s#]*", " ", text)


def test_texts_name_files_that_exist(root: Path) -> None:
    files = {Path(name).name for name, _ in texts(root)} | {"train.py"}  # the user's
    references = {
        f"{name}: {file}"
        for name, text in texts(root)
        if not name.startswith("tests")
        for file in re.findall(r"(?<=[(` ])(\w+\.py)(?=[)`, ]|$)", text, re.MULTILINE)
        if file not in files
    }
    assert references == set()


PUBLIC_TWINS = {"Shuffle", "pad", "resize"}
"""Operators that images, detection and text each have, in modules of their own; and a
name of MindSpore's."""


def test_each_class_has_a_name_of_its_own(modules: dict[str, Path]) -> None:
    places: dict[str, set[Path]] = {}
    for path in modules.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, set()).add(path)
    assert {name for name, paths in places.items() if len(paths) > 1} <= PUBLIC_TWINS
