"""Speculative decoding: tokens that were guessed are verified together in one pass."""
