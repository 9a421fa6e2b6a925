"""Shared parts of the commands: options, prompts, loading, calibration, checks and what the terminal shows."""
