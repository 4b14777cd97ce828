"""engine/workers/process: see the README."""
