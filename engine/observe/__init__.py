"""engine/observe: see the README."""
