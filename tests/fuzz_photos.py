"""Give the extension for photographs a million damaged files: does its memory hold?

    python tests/fuzz_photos.py [--files 1000000] [--seed N]

The extension is compiled with AddressSanitizer and UndefinedBehaviorSanitizer, which
end this program at the first fault. Files are JPEGs of noise, of all samplings, with
bytes changed, cut out, doubled or filled. Each is looked at, and a crop of it is made
at a random scale and size. It takes about five minutes on one core.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import simplejpeg

SOURCE = Path(__file__).parents[1] / "pipeline" / "image" / "_photos.c"
SANITIZERS = "-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all"
BUILT = "PENSTOCK_FUZZED"
"""The environment variable that names the compiled extension."""
GCC = shutil.which("gcc") or "gcc"
TOGETHER = 50
SIDE = 70


def compiled(folder: Path) -> Path:
    """Compile the extension with sanitizers; return its path."""
    built = folder / "_photos.so"
    flags = [*shlex.split(SANITIZERS), "-fPIC", "-shared"]
    include = f"-I{sysconfig.get_path('include')}"
    command = [GCC, *flags, include, str(SOURCE), "-o", str(built), "-ljpeg", "-lm"]
    subprocess.run(command, check=True)
    return built


def start(options: list[str]) -> int:
    """Run this program with the sanitizer loaded first; return its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(
            [GCC, "-print-file-name=libasan.so"], capture_output=True, check=True
        )
        environment = {
            **os.environ,
            BUILT: str(compiled(Path(folder))),
            "LD_PRELOAD": process.stdout.decode().strip(),
            "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps much to its end
        }
        command = [sys.executable, "-P", __file__, *options]
        return subprocess.run(command, env=environment, check=False).returncode


def loaded(path: str) -> Any:
    """Return the extension from this file."""
    loader = ExtensionFileLoader("_photos", path)
    spec = spec_from_file_location("_photos", path, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def originals() -> list[bytes]:
    """Return files of noise that are intact."""
    noise = np.random.default_rng(0).integers(0, 256, (SIDE - 3, SIDE, 3), np.uint8)
    files = [
        simplejpeg.encode_jpeg(noise, 90, colorspace="RGB", colorsubsampling=sampling)
        for sampling in ("444", "422", "440", "420", "411")
    ]
    gray = np.ascontiguousarray(noise[:, :, :1])
    files.append(simplejpeg.encode_jpeg(gray, colorspace="Gray"))
    for options in ({"restart_marker_blocks": 2}, {"progressive": True}):
        file = io.BytesIO()
        PIL.Image.fromarray(noise).save(file, "JPEG", **options)
        files.append(file.getvalue())
    return files


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return a file with bytes changed, cut out, doubled or filled."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        at = rng.randrange(rng.choice((len(changed), 700)))
        changed[at] = rng.choice((rng.randrange(256), changed[at] ^ 1, 0xFF, 0))
    start, end = sorted(rng.randrange(len(changed)) for _ in range(2))
    match rng.randrange(12):
        case 0:
            del changed[start:]
        case 1:
            del changed[start:end]
        case 2:
            changed[start:start] = changed[start:end]
        case 3:
            changed[start:end] = bytes(end - start)
    return bytes(changed)


def crop(size: list[int], rng: random.Random) -> tuple[int, ...]:
    """Return a crop of an image of this size, which may reach beyond it."""
    height, width = size if rng.random() < 0.9 and size[0] else (SIDE - 3, SIDE)
    factor = rng.choice((1, 1, 1, 2, 4, 8, 3, 0))
    tall, wide = -(-height // (factor or 1)), -(-width // (factor or 1))
    top, left = rng.randrange(tall + 1), rng.randrange(wide + 1)
    rest = rng.randrange(tall - top + 2), rng.randrange(wide - left + 2)
    return height, width, factor, top, left, *rest, rng.randrange(2)


def fuzz(extension: Any, count: int, rng: random.Random) -> None:
    """Hand damaged files over, and report how many were decoded all the same."""
    files, crop_count, began = originals(), 0, time.monotonic()
    for first in range(0, count, TOGETHER):
        batch = [damaged(rng.choice(files), rng) for _ in range(TOGETHER)]
        sizes = np.zeros((TOGETHER, 2), np.int32)
        extension.sizes(batch, sizes)
        crops = np.array([crop(size, rng) for size in sizes.tolist()], np.int32)
        room = (TOGETHER, rng.randrange(1, 40), rng.randrange(1, 40), 3)
        pixels = np.empty(room, np.uint8)
        crop_count += sum(extension.crops(batch, crops, pixels, rng.random() < 0.5))
        if first % 50_000 == 0 or first + TOGETHER >= count:
            seconds = time.monotonic() - began
            print(
                f"{first + TOGETHER:>9,} files, {crop_count:,} made, {seconds:4.0f} s"
            )


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 20))
    options = parser.parse_args()
    if (built := os.environ.get(BUILT)) is None:
        sys.exit(start(sys.argv[1:]))
    print(f"seed {options.seed}")
    fuzz(loaded(built), options.files, random.Random(options.seed))


if __name__ == "__main__":
    main()
