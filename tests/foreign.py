"""Install a package of another author, with one entry point."""

import subprocess
import sys
from pathlib import Path


def run_beside(folder: Path, group: str, entry: str, source: str, code: str) -> str:
    """Install `source` in `folder` with an entry point `name:target` of a group, and return what `code` prints."""
    name, _, target = entry.partition(":")
    (folder / "foreign.py").write_text(source)
    info = folder / "foreign-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = foreign:{target}\n")
    paths = [str(folder), str(Path(__file__).parents[1])]
    code = f"import sys; sys.path[:0] = {paths}\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
