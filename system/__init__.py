"""system: see the README."""
