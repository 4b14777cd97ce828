"""engine/batch: see the README."""
