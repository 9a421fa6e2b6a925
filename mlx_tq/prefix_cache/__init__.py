"""KV caches of prompts on disk, content-addressed, so that prompts that share a prefix skip its prefill."""
