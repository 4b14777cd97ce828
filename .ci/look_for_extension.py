"""Say in one sentence what is missing if the extension in C was not compiled.

    .venv/bin/python -P .ci/look_for_extension.py

penstock works without it, so setuptools is silent about it, and this never fails.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

SOURCE = Path("pipeline/image/_photos.c")
HEADERS = {
    "#include <stdio.h>": "the headers of C",
    "#include <Python.h>": "the headers of Python",
    "#include <stdio.h>\n#include <jpeglib.h>": "the headers of libjpeg-turbo",
}
COST = (
    "ps.image decodes photographs whole, which takes 1.4 times as long as decoding what"
    " is cropped"
)
CURE = (
    "on Debian or Ubuntu, apt install gcc libc6-dev python3-dev libjpeg-dev, then make"
    " clean and make again"
)


def main() -> None:
    """Print the sentence, if one is needed."""
    built = SOURCE.with_suffix(str(sysconfig.get_config_var("EXT_SUFFIX")))
    if not built.exists():
        print(f"set-up: without {missing()}, {COST}; {CURE}")


def missing() -> str:
    """Return what a C compiler lacks here."""
    variables = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    compiler = shlex.split(str(variables))
    if shutil.which(compiler[0]) is None:
        return "a C compiler"
    for text, name in HEADERS.items():
        if not passes(compiler, text):
            return name
    return "a libjpeg-turbo of 2.1 or later, with what links to it"


def passes(compiler: list[str], text: str) -> bool:
    """Return whether the preprocessor finds all that `text` includes."""
    flags = shlex.split(os.environ.get("CFLAGS", ""))
    include = f"-I{sysconfig.get_path('include')}"
    command = [*compiler, *flags, include, "-E", "-x", "c", "-", "-o", os.devnull]
    done = subprocess.run(
        command, input=text.encode(), capture_output=True, check=False
    )
    return done.returncode == 0


if __name__ == "__main__":
    main()
