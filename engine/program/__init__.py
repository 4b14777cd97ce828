"""engine/program: see the README."""
