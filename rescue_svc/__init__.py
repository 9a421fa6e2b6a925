"""The rescue service: evicted spans of a chat, kept on localhost and found again. It never imports mlx_tq."""

from importlib.metadata import version

__version__ = version("mlx-tq")
