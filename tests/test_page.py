"""The page of a run in a real browser: accessible to all, and usable by keyboard."""

from __future__ import annotations

import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from penstock.autotune.report.page import write_page
from penstock.autotune.report.recording import read_recording
from support.chromium import looked_at
from support.pages import ranks_in
from support.recordings import record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

AXE, UPLOT = "axe-core@4.14.1", "uplot@1.6.32"
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
  parent.put("charts", document.querySelectorAll(".chart canvas").length);
  const marks = document.querySelectorAll("[data-rank] button"), heard = [];
  const said = document.querySelector(".said");
  const chart = document.querySelector(".chart");
  marks[0].focus();
  parent.put("mark", [said.textContent, marks[0].ariaLabel]);
  marks[1].dispatchEvent(new Event("mouseenter"));
  parent.put("hover", [said.textContent, marks[1].ariaLabel]);
  chart.focus();
  for (const key of ["ArrowLeft", "ArrowLeft", "ArrowRight"]) {
    chart.dispatchEvent(new KeyboardEvent("keydown", { key }));
    heard.push(said.textContent);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  parent.put("heard", heard);
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
def npm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of npm's packages: axe and uPlot."""
    folder = tmp_path_factory.mktemp("npm")
    command = ["npm", "install", "--silent", "--no-audit", "--prefix", str(folder)]
    subprocess.run([*command, AXE, UPLOT], check=True, timeout=120)
    return folder / "node_modules"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("uplot.min.js", "uPlot.iife.min.js"), ("uplot.min.css", "uPlot.min.css")],
)
def test_the_chart_library_is_npms_to_the_byte_below_its_notice(
    npm: Path, ours: str, theirs: str
) -> None:
    library = files("penstock.autotune.report")
    notice, _, text = library.joinpath(ours).read_bytes().partition(b"*/\n")
    assert text == (npm / "uplot" / "dist" / theirs).read_bytes()
    assert f"NOTICE: {UPLOT.replace('uplot@', 'uPlot ')}," in notice.decode()
    licence = (npm / "uplot" / "LICENSE").read_bytes()
    assert licence in library.joinpath("uplot.min.js").read_bytes()


@pytest.mark.parametrize(("width", "colors"), [(360, "dark"), (1440, "light")])
def test_the_page_is_readable_by_all_and_searchable_by_keys(
    tmp_path: Path, npm: Path, width: int, colors: str
) -> None:
    for rank in range(2):
        record(tmp_path / "run", "train", rank)
    path = tmp_path / "run.html"
    write_page(read_recording(tmp_path / "run"), path)
    settings = ["--blink-settings=preferredColorScheme=0"] if colors == "dark" else []
    axe = (npm / "axe-core" / "axe.min.js").read_text()
    said, complaints = looked_at(path, CHECKS % axe, width, 900, *settings)
    assert complaints == ""
    assert said["axe"] == []
    assert (said["width"], said["dark"]) == (width, colors == "dark")
    assert said["wide"] <= 0
    assert said["rows"]
    assert all("num_parallel_workers" in row for row in said["rows"])
    ranks = ranks_in(path.read_text())
    assert said["charts"] == sum(len(rank["charts"]) for rank in ranks)
    marks, waits = ranks[0]["marks"], ranks[0]["charts"][0]
    for shown, mark in zip((said["mark"], said["hover"]), marks, strict=False):
        assert shown[0] == shown[1]
        assert shown[0].endswith(f"{mark['text']}. {mark['why']}")
    shares = waits["curves"]["wait"]
    heard = [float(text.split(": wait ")[1].rstrip("%")) for text in said["heard"]]
    assert heard == [shares[-2], shares[-3], shares[-2]]
