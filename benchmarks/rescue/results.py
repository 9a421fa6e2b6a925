"""Write results of the rescue service with the machine and versions."""

import json
import os
import platform
import sqlite3
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "results"


def save(name: str, results: Any) -> None:
    machine = {
        "system": platform.platform(terse=True),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average": [round(load, 1) for load in os.getloadavg()],  # above the cores: others were measured too
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "faiss": version("faiss-cpu"),
    }
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")
    print(f"\nwritten: {path}")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    names = [
        line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
    ]
    return names[0] if names else platform.machine()
