"""Folders of models in the hub's cache, as its own tools leave them there."""

import os
from pathlib import Path


def hub_folders(repository: str) -> list[Path]:
    """Return the snapshots of a repository that are on this machine, the newest first."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    snapshots = (cache / f"models--{repository.replace('/', '--')}" / "snapshots").glob("*")
    return sorted(snapshots, key=lambda folder: folder.stat().st_mtime, reverse=True)


def stay_offline() -> None:
    """Let no library of this process ask the hub, not even for a newer model; and stderr is for lines of JSON."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
