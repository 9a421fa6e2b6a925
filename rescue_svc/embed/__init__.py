"""Embedders: text to unit vectors, in a process of their own."""

from rescue_svc.embed.registry import Choice, choose_embedder, load_embedder
from rescue_svc.embed.worker import EmbedWorker

__all__ = ["Choice", "EmbedWorker", "choose_embedder", "load_embedder"]
