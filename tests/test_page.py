"""The page of a run in a real browser: accessible to all, and usable by keyboard."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from penstock.autotune.report.page import write_page
from penstock.autotune.report.recording import read_recording
from support.chromium import looked_at
from support.recordings import record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

AXE = "axe-core@4.14.1"
CHECKS = """
<script>%s</script>
<script>
window.addEventListener("load", async () => {
  for (let tries = 0; tries < 100 && !window.unpacked; tries++)
    await new Promise((resolve) => setTimeout(resolve, 20));
  const search = document.getElementById("search");
  search.focus();
  search.value = "num_parallel_workers";
  search.dispatchEvent(new Event("input"));
  const rows = document.querySelectorAll("#lines tr");
  parent.put("rows", [...rows].map((row) => row.textContent));
  parent.put("width", window.innerWidth);
  parent.put("dark", matchMedia("(prefers-color-scheme: dark)").matches);
  parent.put("wide", document.documentElement.scrollWidth - window.innerWidth);
  const found = await axe.run();
  parent.put("axe", found.violations.map((each) =>
    [each.id, each.help, each.nodes.slice(0, 2).map((node) => node.html)]));
});
</script>
"""


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("axe")
    command = ["npm", "install", "--silent", "--no-audit", "--prefix", str(folder), AXE]
    subprocess.run(command, check=True, timeout=120)
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text()


@pytest.mark.parametrize(("width", "colors"), [(360, "dark"), (1440, "light")])
def test_the_page_is_readable_by_all_and_searchable_by_keys(
    tmp_path: Path, axe: str, width: int, colors: str
) -> None:
    for rank in range(2):
        record(tmp_path / "run", "train", rank)
    path = tmp_path / "run.html"
    write_page(read_recording(tmp_path / "run"), path)
    settings = ["--blink-settings=preferredColorScheme=0"] if colors == "dark" else []
    said, complaints = looked_at(path, CHECKS % axe, width, 900, *settings)
    assert complaints == ""
    assert said["axe"] == []
    assert (said["width"], said["dark"]) == (width, colors == "dark")
    assert said["wide"] <= 0
    assert said["rows"]
    assert all("num_parallel_workers" in row for row in said["rows"])
