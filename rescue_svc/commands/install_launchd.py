"""Start the service at login (macOS)."""

# ruff: noqa: T201 - prints the output of a command

import plistlib
import sys
from pathlib import Path

from http_limits.process_checks import home_error
from rescue_svc.errors import SettingsError
from rescue_svc.settings import Settings

LABEL = "com.mlx-tq.rescue"


def run(settings: Settings, print_only: bool = False) -> None:
    """Write the property list of a job that is restarted when it fails, or print it.

    The token is not in it, because every program of the user can read the file; a service on loopback needs none.
    """
    if fault := home_error():
        raise SettingsError(fault)
    arguments = ["serve", "--data-dir", str(settings.data_dir), "--port", str(settings.port)]
    job = plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": [str(Path(sys.argv[0]).resolve()), *arguments, "--embedder", settings.embedder],
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 10,
            "ProcessType": "Background",
            "StandardErrorPath": str(Path.home() / "Library" / "Logs" / "mlx-tq-rescue.log"),
            "Umask": 0o077,
        }
    )
    if print_only:
        sys.stdout.buffer.write(job)
        return
    if sys.platform != "darwin":
        raise SettingsError("install-launchd works on macOS only; --print shows the file, deploy/ has Docker's")
    path = Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(job)
    print(f"{path} written; start it now with: launchctl bootstrap gui/$(id -u) {path}")
