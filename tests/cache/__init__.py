"""Tests of the compressed caches, one layer at a time."""
