"""README and docs: their code runs, and their links lead somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from support import warm
from support.doc_blocks import BLOCK, draw_given_photos, write_script

ROOT = Path(__file__).parents[1]
PAGES = [
    page
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]
    if page.parts[-2][0] != "."
]
RUN = [page for page in PAGES if page.parent in (ROOT, ROOT / "docs")]
FENCED = re.compile(r"^(```|~~~).*?^\1$", re.MULTILINE | re.DOTALL)
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
    done = warm.run([sys.executable, *script], cwd=tmp_path, brief=True)
    assert done.returncode == 0, done.stderr


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
    kept = re.sub(r"[^\w\s-]", "", heading.lower())
    return re.sub(r"\s", "-", kept.strip())
