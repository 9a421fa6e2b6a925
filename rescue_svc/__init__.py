"""The rescue service stores evicted spans of a chat on localhost and retrieves them. It never imports mlx_tq."""

from importlib.metadata import version

__version__ = version("mlx-tq")
