"""Pages in a real Chromium: values that their scripts report, and console lines."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any


def browser() -> str:
    """Return the browser's path."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    assert path, "these tests need a chromium (Debian: apt install chromium)"
    return path


def looked_at(
    path: Path, scripts: str, width: int, height: int = 900, *settings: str
) -> tuple[dict[str, Any], str]:
    """Open a page with additional scripts.

    It is shown in a frame, because a window is never narrower than 500 pixels.

    Args:
        path: path of the page, which is not changed.
        scripts: HTML. The scripts report with `parent.put(name, value)`.
        width: width of the frame in pixels.
        height: its height, likewise.
        settings: further options of the browser.

    Returns:
        The reported values by name, and the lines of the console.
    """
    page = path.read_text().replace("</body>", scripts + "</body>")
    outer = path.with_suffix(f".{width}.checked.html")
    outer.write_text(FRAME.format(page=html.escape(page), width=width, height=height))
    command = [
        *(browser(), "--headless", "--no-sandbox", "--disable-gpu"),
        "--disable-dev-shm-usage",
        *("--enable-logging=stderr", "--virtual-time-budget=20000", *settings),
        *("--window-size=1600,1200", "--dump-dom", outer.as_uri()),
    ]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True
    )
    pairs = re.findall(r'<pre id="put-(\w+)">(.*?)</pre>', process.stdout, re.DOTALL)
    values = {name: json.loads(html.unescape(text)) for name, text in pairs}
    complaints = [line for line in process.stderr.splitlines() if "CONSOLE" in line]
    return values, "\n".join(complaints)


FRAME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>a frame</title></head><body>
<script>
function put(name, value) {{
  const place = document.createElement("pre");
  place.id = `put-${{name}}`;
  place.textContent = JSON.stringify(value);
  document.body.append(place);
}}
</script>
<iframe title="page" srcdoc="{page}" width="{width}" height="{height}"></iframe>
</body></html>
"""
