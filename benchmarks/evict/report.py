"""The JSON that the benchmarks of this folder write."""

import json
from pathlib import Path
from typing import Any

from mlx_tq.cli.environment import environment


def write(path: Path | None, command: str, rows: list[dict[str, Any]], **more: Any) -> None:
    if path is not None:
        path.write_text(json.dumps({"command": command, **more, **environment(), "rows": rows}, indent=1) + "\n")
