"""Worker processes, and the transport that they share with the child that hosts an engine."""
