"""The compressed prompt cache of a model: its plan, eviction, archive and recall, memory, and files."""
