"""Read the prompts, texts, files and JSON that flags name; this imports no model code."""

import argparse
import json
import sys
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from mlx_tq.errors import ConfigError


def read_prompt(args: argparse.Namespace) -> str:
    r"""Return the prompt of -p (with \n and \t), of --prompt-file, or of standard input."""
    try:
        if args.prompt_file is not None:
            prompt = read_file("prompt file", args.prompt_file)
        elif args.prompt not in (None, "-"):
            prompt = str(args.prompt).replace("\\n", "\n").replace("\\t", "\t")
        elif args.prompt is None and sys.stdin.isatty():
            raise ConfigError("there is no prompt; give one with -p TEXT, --prompt-file FILE or on standard input.")
        else:
            prompt = sys.stdin.read()
        prompt.encode()  # bytes that are not text can also arrive as lone surrogates
    except UnicodeError as error:
        raise ConfigError("the prompt is not UTF-8 text; convert it first, for example with iconv.") from error
    if not prompt.strip():
        raise ConfigError("the prompt is empty; give some text with -p, --prompt-file or on standard input.")
    return prompt


def read_file(kind: str, path: str) -> str:
    """Return the text of a file that a user names; `kind` says in errors what it is."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the {kind} {path} cannot be read: {error}. Give a UTF-8 file.") from error


def read_share(name: str, text: str) -> float:
    """Return a share that a user writes, such as 25%; `name` says in errors where."""
    from mlx_tq.config import parse_budget  # loads mlx, which --help does without

    with suppress(ConfigError):
        budget = parse_budget(text)
        if budget.share is not None and budget.length is None:
            return budget.share
    raise ConfigError(f"{name} is {text!r}; write a share of the rows, such as 25%.")


def load_text() -> str:
    """Return the beginning of WikiText-2's test split, 80,000 tokens of the bundled model."""
    return (files("mlx_tq") / "assets" / "text" / "wikitext-2-test.txt").read_text(encoding="utf-8")


def read_text(path: str | None) -> str:
    """Return the text of a file that a user names, by default that of `load_text`."""
    return load_text() if path is None else read_file("text", path)


def read_schema(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the JSON schema of --json-schema, if there is one."""
    path = args.json_schema
    if path is None:
        return None
    try:
        schema = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--json-schema {path} cannot be read: {error}. Give a JSON file.") from error
    if not isinstance(schema, dict):
        raise ConfigError(f"--json-schema {path} holds {schema!r:.80}; it must be a JSON object.")
    return schema
