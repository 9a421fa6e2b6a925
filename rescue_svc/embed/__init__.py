"""Embedders: text to unit vectors, in a process of their own."""

from rescue_svc.embed.registry import choose_embedder, embedder_class
from rescue_svc.embed.worker import EmbedWorker

__all__ = ["EmbedWorker", "choose_embedder", "embedder_class"]
