"""The store of prefixes on disk: what was read once, by any conversation, need not be read again."""
