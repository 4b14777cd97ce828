"""Makes an environment for each peer, once.

    cd benchmarks && ../.venv/bin/python -m peers.environments [--envs DIR] [PEER ...]

Only the packages pinned in requirements/ are installed, without their dependencies.
torch is large, so peers that need it use the one in the environment that runs this, in
which penstock runs, too. If a peer cannot be installed, the next run tries again.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PEERS", "Environment", "Unavailable", "python_of"]

DEFAULT = Path("~/.cache/penstock/peers").expanduser()
REQUIREMENTS = Path(__file__).with_name("requirements")
READY = "installed.txt"
"""The file that records the packages of an environment."""
SAID = 300
"""Characters kept of an error."""


class Unavailable(RuntimeError):
    """A peer cannot be run here; the text says why."""


@dataclass(frozen=True)
class Environment:
    """The needs of a peer besides its requirements."""

    imports: str
    """Modules that must be installed."""
    beside_torch: bool = True
    hint: str = ""
    """Packages that may be missing if they cannot be installed."""

    @property
    def variables(self) -> dict[str, str]:
        """The variables of its processes.

        Loaders run torch on many threads, so each thread must compute by itself.
        """
        return {"OMP_NUM_THREADS": "1"} if self.beside_torch else {}


PEERS = {
    "penstock": Environment("penstock"),
    "torch": Environment("torch, PIL, simplejpeg"),
    "torchdata": Environment("torchdata.nodes, torch"),
    "grain": Environment("grain, torch"),
    "spdl": Environment("spdl.pipeline, torch"),
    "tensorflow": Environment("tensorflow", beside_torch=False),
    "mindspore": Environment("mindspore.dataset", beside_torch=False),
    "ffcv": Environment(
        "ffcv",
        hint="it is compiled, with what pkg-config finds as opencv4 and libturbojpeg",
    ),
}


def python_of(peer: str, envs: Path) -> str:
    """Return the interpreter of a peer's environment; make the environment if needed.

    Raises:
        Unavailable: it cannot be made.
    """
    if peer == "penstock":
        return sys.executable
    folder = envs / peer
    python = folder / "bin" / "python"
    contents = f"{sys.version}\n{(REQUIREMENTS / f'{peer}.txt').read_text()}"
    ready = folder / READY
    if not ready.exists() or ready.read_text() != contents:
        print(f"{peer}: installing it into {folder}", file=sys.stderr, flush=True)
        make(peer, folder, python)
        ready.write_text(contents)
    return str(python)


def make(peer: str, folder: Path, python: Path) -> None:
    """Install a peer, and import it once."""
    venv.create(folder, clear=True, with_pip=True)
    requirements = REQUIREMENTS / f"{peer}.txt"
    pip = ["-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
    run(peer, python, *pip, "-r", str(requirements))
    if PEERS[peer].beside_torch:
        share(folder)
    run(peer, python, "-c", f"import {PEERS[peer].imports}")


def share(folder: Path) -> None:
    """Add this environment's packages to another one, after its own."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    scheme = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", scheme))
    # A line of its own for each: last in the alphabet is last in sys.path.
    (site / "zz_torch.pth").write_text(f"{Path(spec.origin).parents[1]}\n")


def run(peer: str, python: Path, *arguments: str) -> None:
    """Run a command in an environment.

    Raises:
        Unavailable: it failed.
    """
    environment = os.environ | PEERS[peer].variables
    environment.pop("PYTHONPATH", None)
    process = subprocess.run(
        [python, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise Unavailable(reason(process.stderr, PEERS[peer].hint))


def reason(output: str, hint: str) -> str:
    """Return the most informative line of a failed command's output."""
    lines = [line.strip() for line in output.splitlines() if "Error" in line]
    lines = lines or [line for line in output.splitlines() if line.strip()][-1:]
    return "; ".join([*(line[:SAID] for line in lines[-1:]), *filter(None, [hint])])


def main() -> None:
    """Make all environments, or those that are named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers", nargs="*", metavar="PEER")
    parser.add_argument("--envs", type=Path, default=DEFAULT, metavar="DIR")
    options = parser.parse_args()
    for peer in options.peers or PEERS:
        try:
            print(f"{peer}: {python_of(peer, options.envs)}", flush=True)
        except Unavailable as error:
            print(f"{peer}: cannot be installed: {error}", flush=True)


if __name__ == "__main__":
    main()
