"""The launchd job that starts the service at login on macOS."""

import plistlib
import sys
from pathlib import Path

from rescue_svc.errors import SettingsError
from rescue_svc.settings import Settings

LABEL = "com.mlx-tq.rescue"


def job(program: Path, settings: Settings, logs: Path) -> bytes:
    """Return the property list: restarted when it fails, low priority, its log in `logs`.

    The token is not in it, as every program of the user can read the file; a service on loopback needs none.
    """
    return plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": [
                str(program),
                "serve",
                "--data-dir",
                str(settings.data_dir),
                "--port",
                str(settings.port),
                "--embedder",
                settings.embedder,
            ],
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 10,
            "ProcessType": "Background",
            "StandardErrorPath": str(logs / "mlx-tq-rescue.log"),
            "Umask": 0o077,
        }
    )


def install(settings: Settings) -> Path:
    """Write the job to the user's LaunchAgents and return its path; raise SettingsError elsewhere than on macOS."""
    if sys.platform != "darwin":
        raise SettingsError("install-launchd works on macOS only; --print shows the file, deploy/ has Docker's")
    folder = Path.home() / "Library" / "LaunchAgents"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{LABEL}.plist"
    path.write_bytes(job(program(), settings, Path.home() / "Library" / "Logs"))
    return path


def program() -> Path:
    """The path of this command."""
    return Path(sys.argv[0]).resolve()
