"""Clients fill the prefix cache to its limit, while others are answered from it."""

import random
import threading
import time

import pytest

from mlx_tq.prefix_cache.folder import BLOCKS, Folder

from .conftest import question
from .harness import together
from .test_cached_prompts import text_of

LIMIT = 5_000_000  # bytes, of which a turn takes a tenth to a third
TURNS, CLIENTS = 3, 8


@pytest.mark.full
@pytest.mark.parametrize(("conversations", "seconds"), [(5, 6), pytest.param(12, 600, marks=pytest.mark.full)])
def test_a_full_store_keeps_its_limit_and_changes_no_answer(start, tmp_path, conversations, seconds):
    """Conversations share system messages; clients send their turns in any order, again and again."""
    alone = start("--prefix-cache", "off", "--prompt-cache-bytes", "1KB")
    expected = [(turn, text) for number in range(conversations) for turn, text in conversation(alone, number)]
    alone.stop()
    path = tmp_path / "store"
    server = start("--prefix-cache", path, "--prefix-cache-limit", f"{LIMIT / 1e6}MB", "--prompt-cache-bytes", "1KB")
    deadline = time.monotonic() + seconds

    def client(number):
        chosen, wrong, count = random.Random(number), [], 0
        while count < 4 or time.monotonic() < deadline:
            messages, text = chosen.choice(expected)
            answer = text_of(server.chat(*messages, max_tokens=8))
            wrong += [(messages, answer, text)] if answer != text else []
            count += 1
        return wrong

    sizes, is_done = [], threading.Event()
    watcher = threading.Thread(target=watch, args=(Folder(path), sizes, is_done))
    watcher.start()
    results = together([lambda number=number: client(number) for number in range(CLIENTS)])
    restored, written = server.metrics()["mlx_tq_restored_tokens_total"], largest_record(Folder(path))
    server.stop()
    is_done.set()
    watcher.join()
    assert [answer for wrong in results for answer in wrong] == []
    assert restored > 0
    assert LIMIT / 2 < max(sizes) <= LIMIT + written
    check_reachable(Folder(path))


def conversation(server, number):
    """Yield the messages of each turn, and the answer to them, of which the model is sure."""
    shared = "\n".join(f"Crate {n} weighs {n * 53 % 97} grams." for n in range(8 + 4 * (number % 3)))
    messages = [{"role": "system", "content": shared}]
    for turn in range(TURNS):
        asked = f"Box {turn} is empty.\nWhat is the access code?" if turn else question(9, 135_790 + 72_531 * number)
        messages.append({"role": "user", "content": asked})
        text = text_of(server.chat(*messages, max_tokens=8))
        yield list(messages), text
        messages.append({"role": "assistant", "content": text})


def watch(folder, sizes, is_done):
    while not is_done.wait(0.05):
        sizes.append(sum(record.size for record in folder.records()))


def largest_record(folder):
    return max(record.size for record in folder.records())


def check_reachable(folder):
    """Check that no record is damaged, that all blocks of checkpoints are there, and that there are no others."""
    assert folder.check()[1] == 0
    named = {key for summary in folder.checkpoints().values() for key in summary.block_keys}
    assert named == {record.path.name for record in folder.records() if record.path.parent.name == BLOCKS}
    assert len(folder.checkpoints()) > 1
