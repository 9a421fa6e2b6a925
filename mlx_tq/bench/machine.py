"""The state of this machine that changes its figures: low-power mode, heat and memory that was swapped out."""

import platform
import re
import subprocess
from pathlib import Path
from typing import Any


def machine_state() -> dict[str, Any]:
    """Return low-power mode, thermal state and swapped bytes, or why one is not known."""
    if platform.system() == "Darwin":
        thermal = _run("pmset", "-g", "therm")
        limit = re.search(r"CPU_Speed_Limit\s*=\s*(\d+)", thermal)
        low_power = re.search(r"lowpowermode\s+(\d)", _run("pmset", "-g"))
        used = re.search(r"used = ([\d.]+)M", _run("sysctl", "-n", "vm.swapusage"))
        return {
            "low_power_mode": low_power.group(1) == "1" if low_power else "skipped: pmset does not say",
            "thermal": f"speed limited to {limit.group(1)} %" if limit else " ".join(thermal.split()),
            "swap_nbytes": int(float(used.group(1)) * 2**20) if used else "skipped: sysctl does not say",
        }
    reason = "skipped: only macOS has pmset"
    return {"low_power_mode": reason, "thermal": reason, "swap_nbytes": _linux_swap()}


def swap_growth(before: dict[str, Any], after: dict[str, Any]) -> int | str:
    """Return the bytes that were swapped out between two states, or why they are not known."""
    sizes = before["swap_nbytes"], after["swap_nbytes"]
    return next((size for size in sizes if isinstance(size, str)), None) or sizes[1] - sizes[0]


def hide_home(text: str) -> str:
    """Replace the user's home folder, whose name is often that of the user, by ~."""
    home = str(Path.home()).rstrip("/")
    return text.replace(f"{home}/", "~/") if home else text


def _linux_swap() -> int | str:
    try:
        sizes = dict(re.findall(r"^(Swap\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
        return 1024 * (int(sizes["SwapTotal"]) - int(sizes["SwapFree"]))
    except (OSError, KeyError):
        return "skipped: there is no /proc/meminfo"


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
