"""Children that run an engine: processes of the fork server, and actors of Ray."""
