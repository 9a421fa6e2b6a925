"""Images in a prompt, by mlx-lm's processors."""

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.processors import load_processor

from mlx_tq.errors import ConfigError


def embed_images(
    model: Any, tokenizer: Any, config: dict[str, Any], prompt: str, paths: list[str]
) -> tuple[str, mx.array]:
    """The prompt with its image placeholders expanded, and the input embeddings [tokens, hidden].

    Raises:
        ConfigError: a model without vision, an image that cannot be read, or no Pillow to read it.
    """
    processor = load_processor(model, config)
    if processor is None:
        raise ConfigError("the model does not take images. Drop --image, or take a vision model.")
    try:
        from PIL import Image  # not installed unless wanted
    except ImportError as error:
        raise ConfigError("--image needs Pillow: pip install pillow.") from error
    try:
        images = [np.asarray(Image.open(path).convert("RGB")) for path in paths]
    except OSError as error:
        raise ConfigError(f"an image cannot be read: {error}.") from error
    text, pixels = processor(prompt, images=images)
    embeddings = model.embed_inputs(mx.array(tokenizer.encode(text, add_special_tokens=False)), pixel_values=pixels)
    mx.eval(embeddings)  # the prefill runs on another stream
    return text, embeddings
