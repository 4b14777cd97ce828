"""The multi-level cache of samples: RAM, then local disk."""
