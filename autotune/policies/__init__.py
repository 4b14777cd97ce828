"""Policies: pure functions from observations to changes."""
