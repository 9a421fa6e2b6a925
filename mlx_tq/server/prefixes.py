"""Which prompts the engine restores from the store of prefixes and stores there, and which it leaves to its memory."""

import hashlib
from threading import Thread
from typing import Any

from mlx_tq.prefix_cache.prefix_cache import CachedPrompt, PrefixCache
from mlx_tq.server.conversation import Prompt

# Caches that memory has of a prompt, how many tokens of it, and the prompt in the store where it has more.
Source = tuple[list[Any] | None, int, CachedPrompt | None]

# Seconds of restoring a token, in those of reading it, at most; a tenth of that on two CPU cores. A GPU reads faster.
_RESTORING = 0.05
# So much longer may a prompt take to its first token where that lets it be stored.
_LONGER = 1 / 8
# Tokens behind a point that are sooner read than stored.
_FEW = 32


def salt_of(key: str | None, *, shared: bool) -> str:
    """What the store's keys depend on besides the prompt: who has another API key finds nothing, unless it is shared.

    Prompts of batches are apart from those that are read alone: another batch sums in another order.
    """
    own = "" if shared or not key else hashlib.sha256(key.encode()).hexdigest()
    return f"server {own}"


def stored_prompt(
    store: PrefixCache, asked: Prompt, unstored: int, step: int, kept: int, *, alone: bool = False
) -> CachedPrompt | None:
    """A prompt to restore and store; None where it should rather go on from the caches that memory has.

    From memory a prompt goes on anywhere, so its steps are no longer those of others, and nothing of it is stored.

    Args:
        store: of prefixes.
        asked: whose segments each begin a step.
        unstored: tokens at the prompt's end that are not read in steps.
        step: tokens of a step, at most.
        kept: tokens that memory has.
        alone: no other rank is asked, and what it found counts.
    """
    prompt = _prompt(store, asked, unstored, step)
    length, found = len(asked.ids), prompt.find(alone=alone)
    return prompt if length - found + _RESTORING * found <= (1 + _LONGER) * (length - kept) else None


def going_on(
    store: PrefixCache | None, asked: Prompt, read: CachedPrompt | None, stop: int, step: int
) -> CachedPrompt | None:
    """A prompt that goes on behind `stop` tokens of another one; None if these are not stored while it is read."""
    if store is None or read is None:
        return None
    prompt = _prompt(store, asked, 1, step)
    return prompt if prompt.follow(read, stop) else None


def _prompt(store: PrefixCache, asked: Prompt, unstored: int, step: int) -> CachedPrompt:
    segments = asked.segments
    system = len(segments[0]) if len(segments) > 1 and asked.kinds[0] == "system" else 0
    return store.prompt([*segments[:-1], segments[-1][:-unstored]], step, system)


def is_worth_storing(prompt: CachedPrompt, stop: int) -> bool:
    """The tokens before position `stop` have been read, and there is a point to store."""
    return stop - prompt.last_checkpoint >= _FEW and prompt.can_store(stop)


def close(prompt: CachedPrompt) -> None:
    """The prompt is read. The disk may take its time: no answer waits for it."""
    Thread(target=prompt.close, name="store").start()
