"""`Summary`: the beginning of a checkpoint, by which it is found, and removed, without reading the rest.

u32 length | JSON of that length | token ids, int32
"""

import json
import re
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from mlx_tq.errors import CacheFormatError

KEY = re.compile(r"[0-9a-f]{64}")
_LENGTH_SIZE, _ID_SIZE = 4, 4  # bytes
_MAX_LENGTH = 2**26  # of the JSON
_MAX_TOKENS = 2**26


@dataclass(frozen=True, eq=False)
class Summary:
    """The content of a checkpoint, without its arrays."""

    root: str  # key under which its prompts match
    tokens: np.ndarray  # ids, int32 [n]
    block_keys: tuple[str, ...]  # of its first rows
    slack: int  # number of last tokens that can be trimmed as if they had never been seen
    has_prefixes: bool  # whether its first packed rows alone make a cache of the tokens before

    def to_bytes(self) -> bytes:
        header = {**vars(self), "tokens": len(self.tokens)}
        text = json.dumps(header).encode()
        return len(text).to_bytes(_LENGTH_SIZE, "little") + text + self.tokens.astype("<i4").tobytes()


def read_summary(file: BinaryIO) -> Summary:
    """Read the summary that begins at a file's position; raise CacheFormatError for anything else."""
    try:
        length = int.from_bytes(file.read(_LENGTH_SIZE), "little")
        header = json.loads(file.read(length)) if length <= _MAX_LENGTH else {}
        count, block_keys = int(header["tokens"]), tuple(header["block_keys"])
        tokens = np.frombuffer(file.read(_ID_SIZE * count) if 0 < count <= _MAX_TOKENS else b"", "<i4")
        is_whole = len(tokens) == count > 0 and all(KEY.fullmatch(key) for key in block_keys)
        summary = Summary(str(header["root"]), tokens, block_keys, int(header["slack"]), bool(header["has_prefixes"]))
    except OSError:
        raise
    except Exception as error:
        raise CacheFormatError(f"the summary of a checkpoint is damaged: {error!r}.") from error
    if not is_whole:
        raise CacheFormatError("the summary of a checkpoint contradicts itself.")
    return summary
