"""Where an engine runs: beside the trainer, or in a child of its own."""

from __future__ import annotations
