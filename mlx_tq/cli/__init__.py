"""What commands share: flags, checks before a model runs, prompts, and what they show; in runs/ the work of some."""
