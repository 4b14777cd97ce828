"""Worker processes, and their transport, also used by the process hosting an engine."""
