"""Several processes, on one machine or more, that run one model together and agree on what they evict."""
