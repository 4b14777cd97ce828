"""engine: see the README."""
