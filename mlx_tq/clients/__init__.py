"""Connect coding agents to a running server: their settings, their configuration files, and a server for one run."""
