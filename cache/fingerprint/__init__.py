"""cache/fingerprint: see the README."""
