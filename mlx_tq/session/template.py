"""What a chat template puts around the user's words, so that a conversation grows by its new tokens alone."""

from typing import Any

from jinja2 import TemplateError

from mlx_tq.errors import ConfigError

# Letters that no template trims, escapes or splits.
_USER, _ASSISTANT, _LAST = "QuserQ", "QassistantQ", "QlastQ"


class ChatFrame:
    """The tokens between the words of a conversation.

    Args:
        tokenizer: of the model. Without a chat template, words follow one another with line breaks between.
        system_prompt: that the conversation begins with.
        options: of the chat template.

    Raises:
        ConfigError: the template refuses such a conversation.
    """

    def __init__(self, tokenizer: Any, system_prompt: str | None = None, options: dict[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._ends = set(tokenizer.eos_token_ids)
        if not tokenizer.has_chat_template:
            start = "" if system_prompt is None else f"{system_prompt}\n\n"
            self._opening, self._between, self._closing = self._encode(start, True), self._encode("\n\n"), []
            return
        system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        first = [*system, {"role": "user", "content": _USER}]
        second = [*first, {"role": "assistant", "content": _ASSISTANT}, {"role": "user", "content": _LAST}]
        opening, _, closing = self._render(first, options).partition(_USER)
        between = self._render(second, options).partition(_ASSISTANT)[2].partition(_LAST)[0]
        self._opening, self._between, self._closing = map(self._encode, (opening, between, closing))

    def opening(self) -> list[int]:
        """Before the first words of the user."""
        return list(self._opening)

    def between(self, last: int) -> list[int]:
        """From the last token of an answer to the next words of the user; an answer may have ended its turn itself."""
        ended = last in self._ends and self._between[:1] == [last]
        return list(self._between[1:] if ended else self._between)

    def closing(self) -> list[int]:
        """From the user's words to the answer."""
        return list(self._closing)

    def _render(self, messages: list[dict[str, str]], options: dict[str, Any] | None) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **(options or {})
            )
        except (TemplateError, ValueError) as error:
            raise ConfigError(
                f"the model's chat template refuses this conversation: {error}. Drop the system prompt."
            ) from error
        return str(rendered)

    def _encode(self, text: str, special: bool = False) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special))
