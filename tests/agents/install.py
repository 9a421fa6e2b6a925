"""Install the clients of versions.toml: `python tests/agents/install.py FOLDER`. What is there already stays."""

import json
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

VERSIONS = Path(__file__).with_name("versions.toml")
INSTALLED = "installed.json"
NEWEST_PYTHON = {"aider": (3, 12)}


def install(folder):
    """Bring each part of the folder to the versions of the file."""
    if shutil.which("npm") is None:
        sys.exit("npm is missing: install Node.js 20 or later (https://nodejs.org, or apt install nodejs npm)")
    folder.mkdir(parents=True, exist_ok=True)
    versions = tomllib.loads(VERSIONS.read_text())
    install_part(folder, versions["npm"], install_npm)
    for name, packages in versions["pip"].items():
        newest = NEWEST_PYTHON.get(name, sys.version_info[:2])
        if sys.version_info[:2] > newest:
            print(f"{name} needs Python {newest[0]}.{newest[1]} or earlier, and is skipped")
        else:
            install_part(folder / name, packages, install_pip)


def install_part(folder, packages, install_packages):
    record = folder / INSTALLED
    if record.exists() and json.loads(record.read_text()) == packages:
        return
    record.unlink(missing_ok=True)
    install_packages(folder, packages)
    record.write_text(json.dumps(packages))


def install_npm(folder, packages):
    (folder / "package.json").write_text(json.dumps({"private": True, "dependencies": packages}))
    run("npm", "install", "--no-audit", "--no-fund", "--loglevel=error", folder=folder)


def install_pip(folder, packages):
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", *(f"{name}=={version}" for name, version in packages.items()))


def run(*words, folder=None):
    subprocess.run(words, cwd=folder, check=True)


if __name__ == "__main__":
    install(Path(sys.argv[1]).resolve())
