"""Tests of all layers of a sequence together."""
