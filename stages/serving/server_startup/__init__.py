"""Loaded into the processes of an engine's server, whose environment has nothing of aerie."""
