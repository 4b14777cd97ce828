"""pipeline/compile: see the README."""
