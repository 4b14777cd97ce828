"""Worker processes, and the transport that the child that hosts an engine shares."""
