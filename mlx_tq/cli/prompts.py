"""Put prompts into chat templates and encode them, by mlx-lm's rules."""

import argparse
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.processors import load_processor

from mlx_tq.errors import ConfigError
from mlx_tq.session.text import TEMPLATE_ERRORS, PromptLengthLimit, render_messages

_PLACEHOLDER = "<the-prompt-goes-here>"


def render(tokenizer: Any, prompt: str, args: argparse.Namespace, *, continues: bool) -> str:
    """Put a prompt into the chat template; `continues` if a saved cache already holds the start of the user's turn."""
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        return prompt
    rendered = _apply_template(tokenizer, prompt, args)
    if not continues:
        return rendered
    # The cache has all that comes before the prompt. A template may strip or escape the prompt itself.
    return rendered[_apply_template(tokenizer, _PLACEHOLDER, args).index(_PLACEHOLDER) :]


def _apply_template(tokenizer: Any, prompt: str, args: argparse.Namespace) -> str:
    messages = [] if args.system_prompt is None else [{"role": "system", "content": args.system_prompt}]
    messages.append({"role": "user", "content": prompt})
    has_response = args.prefill_response is not None
    if has_response:
        messages.append({"role": "assistant", "content": args.prefill_response})
    options = {"continue_final_message": has_response, "add_generation_prompt": not has_response}
    options |= args.chat_template_config
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except TEMPLATE_ERRORS as error:
        raise ConfigError(
            f"the model's chat template refuses this conversation: {error}. Drop --system-prompt or "
            "--prefill-response, or add --ignore-chat-template."
        ) from error


def encode(tokenizer: Any, text: str, args: argparse.Namespace) -> list[int]:
    """Return token ids; a chat template has special tokens of its own, plain text gets the tokenizer's."""
    templated = tokenizer.has_chat_template and not args.ignore_chat_template
    ids = list(tokenizer.encode(text, add_special_tokens=not templated))
    if not ids:
        raise ConfigError("the prompt has no tokens. Check that the model has tokenizer.json.")
    return ids


def encode_document(tokenizer: Any, text: str, limit: int | None) -> list[int]:
    """Return token ids of a text that questions follow: the start of the user's turn of at most `limit` tokens."""
    PromptLengthLimit(tokenizer, limit).check(len(text))
    if not tokenizer.has_chat_template:
        return list(tokenizer.encode(text))
    messages = [{"role": "user", "content": text}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    rendered = render_messages(tokenizer, messages, **options)
    return list(tokenizer.encode(rendered, add_special_tokens=False))


def embed_images(
    model: Any, tokenizer: Any, config: dict[str, Any], prompt: str, args: argparse.Namespace
) -> tuple[list[int], mx.array]:
    """Return the tokens of the prompt with its image placeholders expanded, and the embeddings [tokens, hidden]."""
    processor = load_processor(model, config)
    if processor is None:
        raise ConfigError("the model does not support images. Drop --image, or use a vision model.")
    try:
        from PIL import Image  # an optional package
    except ImportError as error:
        raise ConfigError("--image needs Pillow: pip install pillow.") from error
    try:
        images = [np.asarray(Image.open(path).convert("RGB")) for path in args.image]
    except OSError as error:
        raise ConfigError(f"an image cannot be read: {error}.") from error
    text, pixels = processor(prompt, images=images)
    ids = encode(tokenizer, text, args)
    embeddings = model.embed_inputs(mx.array(ids), pixel_values=pixels)
    mx.eval(embeddings)  # the prefill runs on another stream
    return ids, embeddings
