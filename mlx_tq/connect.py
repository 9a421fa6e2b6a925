"""`mlx_tq.connect`: show or write the settings with which a coding agent uses a server, or run the agent with them."""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mlx_tq.cli.options import API_KEY_VARIABLE, check_flags
from mlx_tq.cli.parser import CommandParser, command_parser
from mlx_tq.cli.runner import DONE, run_command
from mlx_tq.clients.coding_clients import CLIENTS, CodingClient
from mlx_tq.clients.config_file import find_changed_settings, merge_settings, settings_text, write_text
from mlx_tq.clients.endpoint import ASSUMED_CONTEXT, Endpoint, find_endpoint
from mlx_tq.clients.started_server import server_command, started_server, stop_process, url_of_port
from mlx_tq.errors import ConfigError, unknown_name

_URL = "http://127.0.0.1:8080"
_SIGNAL_CODE = 128  # a shell adds it to the number of the signal that ended a program
_CLIENT_WORDS = "--"  # what follows is for the client
_PORT, _FOLDER = "PORT", Path("TEMPORARY_FOLDER")  # in a dry run


def _shell_words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of shell words: {error}") from error


class _ListClients(argparse.Action):
    """Show the clients."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        sys.stdout.writelines(f"{name:10}{client.title}\n" for name, client in CLIENTS.items())
        parser.exit()


def build_parser() -> CommandParser:
    usage = "CLIENT [options] [-- ARGUMENTS OF THE CLIENT]"
    parser = command_parser("connect", "Show the settings with which a coding agent uses a running server.", usage)
    add = parser.add_argument
    add("client", metavar="CLIENT", help=f"{', '.join(CLIENTS)}")
    add("--list", action=_ListClients, nargs=0, help="list the clients and exit")
    add("--url", help=f"address of the server (default: {_URL}; with --run, a server that is started for the run)")
    model = "model of the server; of a server that --run starts also a folder, hub name or .gguf file"
    model += " (default: the server's first; with --run, needle, the bundled model)"
    add("--model", metavar="NAME", help=model)
    add("--write", action="store_true", help="write the settings into the client's configuration file")
    add("--run", action="store_true", help="run the client with the settings, for this run only")
    flags = 'further flags of the server that --run starts, as in --server-args="--kv-profile small" (default: none)'
    add("--server-args", type=_shell_words, metavar="FLAGS", help=flags)
    add("--dry-run", action="store_true", help="show what --write or --run would do, and do nothing")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if words is None else words)
    end = words.index(_CLIENT_WORDS) if _CLIENT_WORDS in words else len(words)
    return run_command(build_parser(), lambda args: run(args, words[end + 1 :]), words[:end])


def run(args: argparse.Namespace, client_words: list[str]) -> int:
    """Show, write or run; `client_words` are passed to the client. Returns the exit code of a client that ran."""
    check_flags(args)
    if args.client not in CLIENTS:
        raise unknown_name("client", args.client, CLIENTS)
    if client_words and not args.run:
        raise ConfigError(f"{shlex.join(client_words)!r} is for the client, which only --run starts. Add it.")
    client, key = CLIENTS[args.client], os.environ.get(API_KEY_VARIABLE)
    if args.run:
        return _run_client(args, client, key, client_words)

    server = find_endpoint(args.url or _URL, args.model, key)
    files = client.files(server, os.environ)
    if not args.write:
        _show(client, server, {}, files)
        return DONE
    _write_files(files, dry_run=args.dry_run)
    if not files:
        sys.stdout.write(f"# {client.title} is configured by environment variables; nothing is written.\n")
    if client.environment(server):
        sys.stdout.write("# Set these variables in your shell, or use --run:\n")
        _show(client, server, {}, {})
    return DONE


def _show(
    client: CodingClient, server: Endpoint, added: Mapping[str, str], files: Mapping[Path, Mapping[str, Any]]
) -> None:
    """Print variables as a shell reads them, and files with their content."""
    lines = [f"# {client.title} with {server.model} ({server.context_length} tokens) at {server.url}"]
    lines += [f"unset {name}" for name in client.unset]
    variables = {**client.environment(server), **added}
    lines += [f"export {name}={_shell_value(value, server.key)}" for name, value in variables.items()]
    for path, settings in files.items():
        text = settings_text(path.suffix, settings).rstrip()
        lines += ["", f"# {path}", *([f"# {line}" for line in text.splitlines()] if variables else [text])]
    sys.stdout.write("\n".join(lines) + "\n")


def _shell_value(value: str, key: str | None) -> str:
    """Return a value as a shell reads it; of the API key its variable, so that it is not printed."""
    return f'"${API_KEY_VARIABLE}"' if value == key else shlex.quote(value)


def _write_files(files: Mapping[Path, Mapping[str, Any]], *, dry_run: bool) -> None:
    """Merge the settings into the client's files; all are read before the first is written."""
    texts = {path: merge_settings(path, settings) for path, settings in files.items()}
    for path, text in texts.items():
        if not dry_run:
            sys.stdout.write(f"{path} {'written' if write_text(path, text) else 'has the settings already'}\n")
        elif changed := find_changed_settings(path, files[path]):  # the file's other settings may have secrets
            sys.stdout.write(f"# would add or change in {path}\n{settings_text(path.suffix, changed)}")
        else:
            sys.stdout.write(f"{path} has the settings already\n")


def _run_client(args: argparse.Namespace, client: CodingClient, key: str | None, client_words: list[str]) -> int:
    """Run the client, without --url with a server of its own; return the client's exit code."""
    program = shutil.which(client.program)
    if program is None and not args.dry_run:
        raise ConfigError(f"{client.title} is not installed: no {client.program} on PATH. Run: {client.install}.")

    command = [program or client.program, *client_words]
    if args.dry_run:
        return _show_run(args, client, key, command)
    with ExitStack() as stack:
        # Errors: a process that the client left behind may still write to the folder.
        temporary = tempfile.TemporaryDirectory(prefix="mlx-tq-connect-", ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(temporary))
        url = args.url
        if url is None:
            log = folder / "server.log"
            sys.stderr.write(f"starting mlx_tq.server; its log is {log} until {client.program} ends\n")
            url = stack.enter_context(started_server(args.model, args.server_args or [], key, log))
        server = find_endpoint(url, args.model if args.url else None, key)
        moved = client.moved_to(folder)
        for path, settings in client.files(server, moved).items():
            write_text(path, settings_text(path.suffix, settings))
        inherited = {name: value for name, value in os.environ.items() if name not in client.unset}
        return _call(command, {**inherited, **client.environment(server), **moved})


def _show_run(args: argparse.Namespace, client: CodingClient, key: str | None, command: list[str]) -> int:
    if args.url is None:
        from mlx_tq.models import short_name  # loads mlx

        words = shlex.join(server_command(args.model, args.server_args or [], _PORT))
        sys.stdout.write(f"{words}\n# It picks {_PORT}. The context length, assumed below, is the model's.\n")
        server = Endpoint(url_of_port(_PORT), short_name(args.model), ASSUMED_CONTEXT, key)
    else:
        server = find_endpoint(args.url, args.model, key)
    moved = client.moved_to(_FOLDER)
    _show(client, server, moved, client.files(server, moved))
    sys.stdout.write(f"\n{shlex.join(command)}\n")
    return DONE


def _call(command: list[str], environment: Mapping[str, str]) -> int:
    """Run the client to its end. As in a shell, Ctrl-C is the client's: it may only cancel an answer."""
    previous = signal.signal(signal.SIGINT, lambda *_: None)  # SIG_IGN would be inherited
    try:
        process = subprocess.Popen(command, env=environment)  # noqa: S603  what the user named
        try:
            code = process.wait()
        finally:
            stop_process(process)
    finally:
        signal.signal(signal.SIGINT, previous)
    return code if code >= 0 else _SIGNAL_CODE - code


if __name__ == "__main__":
    sys.exit(main())
