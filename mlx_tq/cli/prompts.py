"""From what the user typed to token ids, by mlx-lm's rules."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from mlx_tq.errors import ConfigError

_MARK = "<the-prompt-goes-here>"


def read_prompt(args: argparse.Namespace) -> str:
    r"""The prompt of -p (with \n and \t), of --prompt-file, or of standard input.

    Raises:
        ConfigError: no prompt, an empty one, two of them, one that is not text, or a file that cannot be read.
    """
    try:
        prompt = _prompt_text(args)
        prompt.encode()  # bytes that are no text can also arrive as lone surrogates
    except UnicodeError as error:
        raise ConfigError(f"the prompt is not UTF-8 text: {error}.") from error
    if not prompt.strip():
        raise ConfigError("the prompt is empty; give some text with -p, --prompt-file or on standard input.")
    return prompt


def _prompt_text(args: argparse.Namespace) -> str:
    if args.prompt is not None and args.prompt_file is not None:
        raise ConfigError("both --prompt and --prompt-file were given; give one of them.")
    if args.prompt_file is not None:
        try:
            return Path(args.prompt_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the prompt file {args.prompt_file} cannot be read: {error}.") from error
    if args.prompt not in (None, "-"):
        return str(args.prompt).replace("\\n", "\n").replace("\\t", "\t")
    if args.prompt is None and sys.stdin.isatty():
        raise ConfigError("there is no prompt; give one with -p TEXT, --prompt-file FILE or on standard input.")
    return sys.stdin.read()


def render(tokenizer: Any, prompt: str, args: argparse.Namespace, *, continues: bool) -> str:
    """The prompt inside the tokenizer's chat template.

    Args:
        tokenizer: of the model.
        prompt: the user's text.
        args: --system-prompt, --prefill-response, --chat-template-config and --ignore-chat-template.
        continues: a saved cache already holds the beginning of the user's turn.

    Raises:
        ConfigError: --chat-template-config is not a JSON object, or the template refuses the messages.
    """
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        return prompt
    rendered = _conversation(tokenizer, prompt, args)
    if not continues:
        return rendered
    # Whatever comes before the user's words is in the cache; a template may strip or escape the words themselves.
    return rendered[_conversation(tokenizer, _MARK, args).index(_MARK) :]


def _conversation(tokenizer: Any, prompt: str, args: argparse.Namespace) -> str:
    messages = [] if args.system_prompt is None else [{"role": "system", "content": args.system_prompt}]
    messages.append({"role": "user", "content": prompt})
    prefilled = args.prefill_response is not None
    if prefilled:
        messages.append({"role": "assistant", "content": args.prefill_response})
    options = {"continue_final_message": prefilled, "add_generation_prompt": not prefilled, **template_config(args)}
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except (TemplateError, ValueError) as error:
        raise ConfigError(
            f"the model's chat template refuses this conversation: {error}. Drop --system-prompt or "
            "--prefill-response, or add --ignore-chat-template."
        ) from error


def template_config(args: argparse.Namespace) -> dict[str, Any]:
    """The options of --chat-template-config.

    Raises:
        ConfigError: it is not a JSON object.
    """
    if args.chat_template_config is None:
        return {}
    try:
        config = json.loads(args.chat_template_config)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--chat-template-config is not JSON: {error}. Write it like '{{\"key\": true}}'.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--chat-template-config is {config!r}; it must be a JSON object.")
    return config


def encode(tokenizer: Any, text: str, args: argparse.Namespace) -> list[int]:
    """Token ids; the chat template has its own special tokens, plain text gets the tokenizer's.

    Raises:
        ConfigError: the tokenizer makes no tokens of the text.
    """
    templated = tokenizer.has_chat_template and not args.ignore_chat_template
    ids = list(tokenizer.encode(text, add_special_tokens=not templated))
    if not ids:
        raise ConfigError("the tokenizer makes no tokens of the prompt. Check that the model has its tokenizer.json.")
    return ids
