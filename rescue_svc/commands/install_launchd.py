"""Start the service at login (macOS)."""

# ruff: noqa: T201 - prints the output of a command

import plistlib
import sys
from pathlib import Path

from rescue_svc.errors import SettingsError
from rescue_svc.settings import Settings

LABEL = "com.mlx-tq.rescue"


def run(settings: Settings, print_only: bool = False) -> None:
    logs = Path.home() / "Library" / "Logs"
    job = make_job(Path(sys.argv[0]).resolve(), settings, logs)
    if print_only:
        sys.stdout.buffer.write(job)
        return
    if sys.platform != "darwin":
        raise SettingsError("install-launchd works on macOS only; --print shows the file, deploy/ has Docker's")
    path = Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(job)
    print(f"{path} written; start it now with: launchctl bootstrap gui/$(id -u) {path}")


def make_job(program: Path, settings: Settings, logs: Path) -> bytes:
    """Return the property list of a job that is restarted when it fails.

    The token is not in it, because every program of the user can read the file; a service on loopback needs none.
    """
    arguments = [str(program), "serve", "--data-dir", str(settings.data_dir), "--port", str(settings.port)]
    return plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": [*arguments, "--embedder", settings.embedder],
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 10,
            "ProcessType": "Background",
            "StandardErrorPath": str(logs / "mlx-tq-rescue.log"),
            "Umask": 0o077,
        }
    )
