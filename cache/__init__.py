"""The multi-level cache, RAM, local disk, remote: subject of a later release."""
