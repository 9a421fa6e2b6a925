"""`mlx-tq-rescue`: run the service and maintain its store. Results go to stdout, everything else to stderr."""

# ruff: noqa: T201 - prints the output of a command

import argparse
import os
import sys
from collections.abc import Sequence
from pkgutil import resolve_name

from http_limits.process_checks import open_standard_streams
from rescue_svc import __version__
from rescue_svc.errors import RescueServiceError, SettingsError

RUN_ERROR, USAGE_ERROR, INTERRUPTED = 1, 2, 130
NOT_FLAGS = ("token", "store")  # a flag would show secrets in the list of processes


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; each field of Settings is a flag of every command."""
    from rescue_svc.settings import Settings  # whose packages are an extra, which may not be installed

    settings = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    group = settings.add_argument_group("settings", "each is also a variable: --data-dir is RESCUE_DATA_DIR")
    for name, field in Settings.model_fields.items():
        if name not in NOT_FLAGS:
            group.add_argument(f"--{name.replace('_', '-')}", metavar="VALUE", help=field.description)
    parser = argparse.ArgumentParser(prog="mlx-tq-rescue", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__, help="show the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add_command(name: str, run: str, help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=help, parents=[settings])
        command.set_defaults(run=run)
        return command

    add_command("serve", "serve:run", "Run the service.")
    doctor = add_command("doctor", "doctor:run", "Check what works on this machine.")
    rebuild = "Build a new database from every intact span, and delete the index files."
    add_command("rebuild", "maintenance:rebuild", rebuild)
    backup = add_command("backup", "maintenance:backup", "Copy the database, even while the service runs.")
    backup.add_argument("folder", help="folder to create")
    sessions = add_command("sessions", "maintenance:list_sessions", "List the sessions, even while the service runs.")
    forget = "Delete a session for good, even while the service runs."
    add_command("forget", "maintenance:forget", forget).add_argument("session")
    launchd = add_command("install-launchd", "install_launchd:run", "Start the service at login (macOS).")
    launchd.add_argument("--print", action="store_true", dest="print_only", help="print the file and install nothing")
    for command in (doctor, sessions):
        command.add_argument("--json", action="store_true", dest="as_json")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 for a run error, 2 for wrong usage or settings, 130 for Ctrl-C."""
    open_standard_streams()
    try:
        return _run_command(argv)
    except ModuleNotFoundError as error:
        print(f"mlx-tq-rescue: the service needs {error.name}: pip install 'mlx-tq[rescue]'.", file=sys.stderr)
        return USAGE_ERROR


def _run_command(argv: Sequence[str] | None) -> int:
    if list(sys.argv[1:] if argv is None else argv) == ["--version"]:  # also without the packages of the parser
        print(__version__)
        return 0
    arguments = vars(build_parser().parse_args(argv))

    from rescue_svc.settings import Settings, load_settings  # likewise

    flags = {name: arguments.pop(name) for name in list(arguments) if name in Settings.model_fields}
    # Imported late: `--help` is instant, and the embedder's child, which imports this module again, stays small.
    run = resolve_name(f"rescue_svc.commands.{arguments.pop('run')}")
    os.umask(0o077)  # only the user may read what the service writes
    try:
        run(load_settings(**flags), **arguments)
    except RescueServiceError as error:
        print(f"mlx-tq-rescue: {error}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, SettingsError) else RUN_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
