"""Embedders turn text into unit vectors, in a child process."""

from rescue_svc.embed.registry import Choice, choose_embedder, load_embedder
from rescue_svc.embed.worker import EmbedWorker

__all__ = ["Choice", "EmbedWorker", "choose_embedder", "load_embedder"]
