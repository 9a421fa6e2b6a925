"""The data of a saved conversation besides its cache, as JSON in the metadata of a prompt cache file."""

import json
from dataclasses import asdict, dataclass

from mlx_tq.config import RescueConfig
from mlx_tq.errors import CacheFormatError
from mlx_tq.rescue.wire import Range
from mlx_tq.session.text import SESSION_ID

_MAX_TOKEN = 2**31 - 1


@dataclass(frozen=True)
class SavedConversation:
    id: str
    ids: list[int]  # tokens, by position
    quoted: list[Range]  # positions of quotations
    rescue: RescueConfig
    last_question: Range  # positions
    turns: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "SavedConversation":
        """Read what `to_json` wrote; other texts may raise any exception."""
        fields = json.loads(text)
        (start, stop), ids = fields["last_question"], fields["ids"]
        quoted = [(first, last) for first, last in fields["quoted"]]
        positions = [position for pair in (*quoted, (start, stop)) for position in pair]
        are_positions = all(type(position) is int and 0 <= position <= len(ids) for position in positions)
        if not are_positions or not all(type(id_) is int and 0 <= id_ <= _MAX_TOKEN for id_ in ids):
            raise CacheFormatError("a token or a position of the conversation is not a valid number")
        turns = fields["turns"]
        if type(turns) is not int or not 0 <= turns <= len(ids):
            raise CacheFormatError("the number of turns of the conversation is not a valid number")
        if not SESSION_ID.fullmatch(fields["id"]):
            raise CacheFormatError("the conversation has no valid id")
        return cls(fields["id"], ids, quoted, RescueConfig(**fields["rescue"]), (start, stop), turns)
