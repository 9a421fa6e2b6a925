"""`mlx-tq-rescue`: serve, and what an operator needs beside it. Answers on stdout, everything else on stderr."""

import argparse
import os
import sys
from collections.abc import Sequence

from rescue_svc.errors import RescueServiceError, SettingsError
from rescue_svc.settings import Settings, load_settings

RUN_ERROR, USAGE_ERROR, INTERRUPTED = 1, 2, 130
NOT_FLAGS = ("token", "store")  # a flag would show them, passwords too, in the list of processes


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; each field of Settings is a flag of every command."""
    settings = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    group = settings.add_argument_group("settings", "each is also a variable: --data-dir is RESCUE_DATA_DIR")
    for name, field in Settings.model_fields.items():
        if name not in NOT_FLAGS:
            group.add_argument(f"--{name.replace('_', '-')}", metavar="VALUE", help=field.description)
    parser = argparse.ArgumentParser(prog="mlx-tq-rescue", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=help, description=help, parents=[settings])

    command("serve", "Run the service.")
    command("doctor", "Say what works on this machine, and what would help.").add_argument(
        "--json", action="store_true", dest="as_json"
    )
    command("rebuild", "Make the database anew from every span that is whole, and drop the index files.")
    command("backup", "Copy the database, also while the service runs.").add_argument("folder", help="a folder to make")
    command("sessions", "List the sessions, also while the service runs.").add_argument(
        "--json", action="store_true", dest="as_json"
    )
    command("forget", "Forget a session for good, also while the service runs.").add_argument("session")
    launchd = command("install-launchd", "Start the service at login (macOS).")
    launchd.add_argument("--print", action="store_true", dest="print_only", help="show the file and install nothing")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 for a run error, 2 for wrong usage or settings, 130 for Ctrl-C."""
    arguments = vars(build_parser().parse_args(argv))
    flags = {name: arguments.pop(name) for name in list(arguments) if name in Settings.model_fields}
    # Imported late: `--help` is instant, and the embedder's child, which imports this module again, stays small.
    from rescue_svc import commands  # FastAPI and FAISS: a second

    os.umask(0o077)  # what the service writes is for its user only
    run = getattr(commands, arguments.pop("command").replace("-", "_"))
    try:
        run(load_settings(**flags), **arguments)
    except RescueServiceError as error:
        print(f"mlx-tq-rescue: {error}", file=sys.stderr)  # noqa: T201 - this is the command line
        return USAGE_ERROR if isinstance(error, SettingsError) else RUN_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
