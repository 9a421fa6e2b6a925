"""A document and its question in one prompt: the document is read, then what the question needs of it comes back."""

import uuid
from collections.abc import Callable
from typing import Any, Self

from mlx_tq.config import RescueConfig
from mlx_tq.rescue import AUTO, OFF, RescueClient, open_service
from mlx_tq.session.bring_back import Brought, bring_back, hold, read_document
from mlx_tq.session.plain_text import PlainText
from mlx_tq.session.recall import archive_warning
from mlx_tq.session.transcript import Transcript, quotation_limit

_START_S = 60.0  # that a service of this machine may take to start


class OnePrompt:
    """Reads one prompt, of which tokens leave. Text that leaves goes to a rescue service, which forgets it at the end.

    Args:
        model: of mlx-lm.
        tokenizer: of the model.
        caches: that read it; nothing else is in them but a beginning that a store had.
        rescue: how text is brought back.
        positions: that the model allows, or None.
        step: tokens read at a time.

    Raises:
        ConfigError: there is no such service.
    """

    def __init__(
        self, model: Any, tokenizer: Any, caches: list[Any], rescue: RescueConfig, positions: int | None, step: int
    ) -> None:
        self._model, self._caches, self._step = model, caches, step
        self._client = None if rescue.service == OFF else RescueClient(open_service(rescue.service))
        self._waits = rescue.service == AUTO
        limit = quotation_limit(rescue, positions)
        self._transcript = Transcript(PlainText(tokenizer), self._client, rescue, uuid.uuid4().hex, limit)

    def read(self, document: list[int], known: int, progress: Callable[[int, int], None]) -> None:
        """Read the document, the first `known` tokens of which the caches hold."""
        read_document(self._model, self._caches, self._transcript, document, known, self._step, progress)

    def ask(self, text: str, ids: list[int], room: int) -> Brought:
        """Bring back what the question needs; what is quoted is held.

        Args:
            text: of the prompt; its last question is asked.
            ids: of the question, with what the template has around it.
            room: positions that are left behind it.
        """
        if self._client is not None and self._waits:
            self._client.ready(_START_S)
        start = len(self._transcript.ids)
        brought = bring_back(self._model, self._caches, self._transcript, text, ids, self._step, room)
        hold(self._caches, brought.rehydration.at(start))
        return brought

    def warnings(self) -> list[str]:
        """What a user should know, once."""
        said = (archive_warning(self._caches), self._client.take_warning() if self._client else None)
        return [warning for warning in said if warning]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        hold(self._caches, None)
        if self._client is not None:
            if self._transcript.told:
                self._client.forget(self._transcript.session_id)
            self._client.close()
