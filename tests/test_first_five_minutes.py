"""The first five minutes of a user with a training script and a slow dataset."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from support import warm

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(300)]

SCRIPT = """
import sys, time
import torch
from torch.utils.data import DataLoader, Dataset


class Photos(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        time.sleep(0.004)  # a slow disk
        if index == BAD:
            raise ValueError("not a JPEG")
        generator = torch.Generator().manual_seed(index)
        return torch.rand(3, 8, 8, generator=generator), index % 10


BAD = int(sys.argv[2])
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(7)
train_loader = DataLoader(Photos(), batch_size=16, shuffle=True)
began = time.monotonic()
for epoch in range(int(sys.argv[1])):
    for step, (images, labels) in enumerate(train_loader):
        if epoch == step == 0:
            print("first batch", time.monotonic() - began)
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch == 0:
            print("labels", labels.tolist())
    print("loss", epoch, repr(loss.item()), flush=True)
"""
EPOCHS = 12
"""Some ten seconds when tuned, in which even a busy machine judges a change."""
ONE_LINE = ("from torch.utils.data import DataLoader, Dataset",)
CHANGED = (
    "import penstock; penstock.set_enable_autotune(True, 'run')\n"
    "from torch.utils.data import Dataset\n"
    "from penstock import DataLoader"
)
ENDING = """
print("--- explain")
print(train_loader.explain())
print("---")
"""


@pytest.fixture
def scripts(tmp_path: Path) -> tuple[Path, Path]:
    """Write the script as it was, and with one import changed and one line added."""
    before, after = tmp_path / "before.py", tmp_path / "train.py"
    before.write_text(SCRIPT)
    after.write_text(SCRIPT.replace(ONE_LINE[0], CHANGED) + ENDING)
    return before, after


def run(script: Path, epochs: int, bad: int = -1) -> tuple[str, str, int]:
    command = [sys.executable, str(script), str(epochs), str(bad)]
    process = warm.run(command, cwd=script.parent)
    return process.stdout, process.stderr, process.returncode


def test_one_import_reports_and_fixes_what_is_slow_and_changes_nothing_else(
    scripts: tuple[Path, Path],
) -> None:
    before, after = scripts
    begun_s = time.monotonic()
    torchs, silent, _ = run(before, EPOCHS)
    torchs_s, begun_s = time.monotonic() - begun_s, time.monotonic()
    ours, stderr, exit_code = run(after, EPOCHS)
    ours_s = time.monotonic() - begun_s
    assert (silent, exit_code) == ("", 0)

    # Minute 1: the same program.
    def trained(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.startswith(("lab", "loss"))]

    assert trained(ours) == trained(torchs)
    assert "Warning" not in stderr
    assert all(line.startswith("[autotune] train: ") for line in stderr.splitlines())

    # Minute 2: they learn something true that they did not know, and it is faster.
    assert re.search(r"input-bound: waiting \d+% of each step \(Photos \d+%", stderr)
    assert re.search(r"kept: \d+ -> \d+ samples/s, trainer wait \d+% -> \d+%", stderr)
    assert ours_s < torchs_s

    # Minute 3: they ask and get an explanation; the log says the same afterwards.
    explained = ours.partition("--- explain\n")[2].partition("---\n")[0]
    assert "Dataset(ID:0) Photos" in explained
    assert re.search(r"^cause: ", explained, re.MULTILINE)
    report = ("-P", "-m", "penstock", "report")
    folder = after.parent
    text = warm.run([sys.executable, *report, "run"], cwd=folder).stdout
    by_hand = r"^  set by hand: DataLoader\(\.\.\., num_workers=\d+"
    assert text.startswith("train\n")
    assert "waiting reads" in text
    assert re.search(by_hand, text, re.MULTILINE)
    warm.run([sys.executable, *report, "run", "--html", "run.html"], cwd=folder)
    assert "waiting reads" in (folder / "run.html").read_text()


def test_an_error_names_the_sample_and_ctrl_c_gives_the_prompt_back(
    scripts: tuple[Path, Path],
) -> None:
    _, after = scripts
    _, stderr, exit_code = run(after, 1, bad=321)
    assert exit_code == 1
    traceback = stderr[stderr.rindex("Traceback") :]
    pattern = r"ValueError: not a JPEG\npenstock: in .*sample index 321"
    assert re.search(pattern, traceback)
    assert (
        stderr.count("ValueError: not a JPEG") <= 2
    )  # in the trainer, and in its worker

    command = [sys.executable, str(after), "60", "-1"]
    with warm.Popen(
        command,
        cwd=after.parent,
        stdout=-1,
        stderr=-1,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        line = ""
        while not line.startswith("loss 1"):  # tuned, and with workers meanwhile
            line = process.stdout.readline()
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert errors.count("Traceback (most recent call last)") == 1
    assert errors.rstrip().splitlines()[-1].startswith(("KeyboardInterrupt", "[autot"))
    assert psutil.wait_procs(workers, timeout=60)[1] == []
