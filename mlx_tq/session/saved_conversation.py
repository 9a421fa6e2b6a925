"""The data of a saved conversation besides its cache, as JSON in the metadata of a prompt cache file."""

import json
from dataclasses import asdict, dataclass
from itertools import chain, pairwise

from mlx_tq.config import RescueConfig
from mlx_tq.errors import CacheFormatError
from mlx_tq.rescue.wire import Range
from mlx_tq.session.text import SESSION_ID
from mlx_tq.session.transcript import TurnRange

_MAX_TOKEN = 2**31 - 1


@dataclass(frozen=True)
class SavedConversation:
    id: str
    ids: list[int]  # tokens, by position
    quoted: list[Range]  # positions of quotations
    rescue: RescueConfig
    turn_ranges: list[TurnRange]
    opening: list[int]  # tokens before the first question
    removed: list[int]  # tokens of removed turns; their positions are negative

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "SavedConversation":
        """Read what `to_json` wrote; other texts may raise any exception."""
        fields = json.loads(text)
        ids, opening, removed = fields["ids"], fields["opening"], fields["removed"]
        quoted = [(first, last) for first, last in fields["quoted"]]
        turn_ranges = [TurnRange(*positions) for positions in fields["turn_ranges"]]
        positions = [position for span in quoted for position in span]
        tokens = [*ids, *opening, *removed]
        if not all(type(number) is int for number in [*positions, *chain(*turn_ranges), *tokens]):
            raise CacheFormatError("a token or a position of the conversation is not a whole number")
        are_positions = all(-len(removed) <= position <= len(ids) for position in positions)
        are_ranges = all(a <= b for a, b in pairwise([0, *chain(*turn_ranges), len(ids)]))
        if not (are_positions and are_ranges and all(0 <= token <= _MAX_TOKEN for token in tokens)):
            raise CacheFormatError("a token or a position of the conversation is out of range")
        if turn_ranges and (turn_ranges[0].start, turn_ranges[0].question) != (0, len(opening)):
            raise CacheFormatError("the first turn of the conversation does not begin where it should")
        if not SESSION_ID.fullmatch(fields["id"]):
            raise CacheFormatError("the conversation has no valid id")
        return cls(fields["id"], ids, quoted, RescueConfig(**fields["rescue"]), turn_ranges, opening, removed)
