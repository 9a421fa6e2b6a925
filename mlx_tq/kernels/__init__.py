"""What the cache computes with: attention over packed rows, and their decoding for prefill. Pure mx operations."""
