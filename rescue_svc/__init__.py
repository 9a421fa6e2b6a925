"""The rescue service: evicted spans of a chat, kept on localhost and found again. It never imports mlx_tq."""
