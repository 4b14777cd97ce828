"""Run torchdata's tests of its loader with ours in its place.

    python tests/upstream.py data/test/stateful_dataloader [--tuned] [-k NAMES]

The folder belongs to a checkout of github.com/pytorch/data; torchdata, expecttest and
parameterized must be installed. Exits with 1 if a test fails that docs/differences.md
does not name.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

DIFFERENCES = Path(__file__).parent.parent / "docs" / "differences.md"
FILES = ("test_dataloader.py", "test_state_dict.py", "test_sampler.py")
IMPORT = re.compile(
    r"^from torchdata\.stateful_dataloader import (?:Stateful, )?StatefulDataLoader\b"
    r"(?: as (\w+))?",
    flags=re.MULTILINE,
)
OURS = """\
from torchdata.stateful_dataloader import Stateful
import penstock
penstock.set_enable_autotune({})
from penstock import DataLoader as {}"""
FAILED = re.compile(r"^_+ (?:ERROR at \w+ of )?\w+\.(test\w*)", flags=re.MULTILINE)


def with_ours(source: str, *, tuned: bool) -> str:
    """Return a test file that uses our loader."""
    return IMPORT.sub(
        lambda m: OURS.format(tuned, m[1] or "StatefulDataLoader"), source
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tuned", action="store_true", help="with autotune on")
    parser.add_argument("-k", default="", help="tests, as pytest takes them")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in FILES:
            source = (options.folder / name).read_text()
            (Path(folder) / name).write_text(with_ours(source, tuned=options.tuned))
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short"]
        command += ["--timeout=300", "-k", options.k, *FILES]
        run = subprocess.run(
            command, check=False, cwd=folder, stdout=subprocess.PIPE, text=True
        )
    print(run.stdout)
    expected = set(re.findall(r"`(?:\w+::)?(test\w*)`", DIFFERENCES.read_text()))
    unknown = sorted(set(FAILED.findall(run.stdout)) - expected)
    sys.exit(f"not in docs/differences.md: {unknown}" if unknown else 0)


if __name__ == "__main__":
    main()
