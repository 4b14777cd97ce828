"""The page of a run in a real browser: nothing it complains of, for eyes and keys."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.autotune.report.page import write_page
from penstock.autotune.report.terminal import read_report
from support.recordings import record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

AXE = "axe-core@4.14.1"
WIDTHS = (360, 1440)
CHECKS = """
<script>%s</script>
<script>
const put = (id, value) => {
  const place = document.createElement("pre");
  place.id = id;
  place.textContent = JSON.stringify(value);
  document.querySelector("main").append(place);
};
window.addEventListener("load", async () => {
  for (let tries = 0; tries < 100 && !window.unpacked; tries++)
    await new Promise((resolve) => setTimeout(resolve, 20));
  const search = document.getElementById("search");
  search.focus();
  search.value = "num_parallel_workers";
  search.dispatchEvent(new Event("input"));
  const rows = document.querySelectorAll("#lines tr");
  put("rows", [...rows].map((row) => row.textContent));
  put("wide", document.documentElement.scrollWidth - window.innerWidth);
  const found = await axe.run();
  put("axe", found.violations.map((each) =>
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


def browser() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    assert found, "these tests need a chromium (Debian: apt install chromium)"
    return found


def looked_at(path: Path, width: int, *settings: str) -> tuple[dict[str, Any], str]:
    """Return what the page says of itself, and what the browser complains of."""
    command = [
        *(browser(), "--headless", "--no-sandbox", "--disable-gpu"),
        *("--enable-logging=stderr", "--virtual-time-budget=20000", *settings),
        *(f"--window-size={width},900", "--dump-dom", path.as_uri()),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True
    )
    found = re.findall(r'<pre id="(rows|wide|axe)">(.*?)</pre>', done.stdout, re.DOTALL)
    said = {
        name: json.loads(
            text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
        )
        for name, text in found
    }
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return said, "\n".join(complaints)


@pytest.mark.parametrize("colors", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_is_readable_by_all_and_searchable_by_keys(
    tmp_path: Path, axe: str, width: int, colors: str
) -> None:
    for rank in range(2):
        record(tmp_path / "run", "train", rank)
    path = tmp_path / "run.html"
    write_page(read_report(tmp_path / "run"), path)
    path.write_text(path.read_text().replace("</body>", CHECKS % axe + "</body>"))
    settings = ["--blink-settings=preferredColorScheme=0"] if colors == "dark" else []
    said, complaints = looked_at(path, width, *settings)
    assert complaints == ""
    assert said["axe"] == []
    assert said["wide"] <= 0
    assert said["rows"]
    assert all("num_parallel_workers" in row for row in said["rows"])
