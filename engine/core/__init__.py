"""engine/core: see the README."""
