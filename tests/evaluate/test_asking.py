from dataclasses import replace

from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.evaluate.arms import Arm
from mlx_tq.evaluate.asking import ask, read_text, whereabouts

CONFIG = KVConfig(sinks=0, window=32, evict=EvictConfig("recency:trigger=16:granularity=1", budget="50%"))


def test_what_the_question_saw_is_counted_after_its_own_round(tiny, embedded):
    """A text read at once evicts nothing until the next forward begins, which is that of the question."""
    caches = Arm("recency", CONFIG).caches(tiny)()
    read_text(tiny, [5] * 400, caches, step=400)
    assert whereabouts(caches, (190, 210)) == (20, 20)
    found = ask(tiny, embedded[1], [7, 8, 9], caches, (190, 210), max_tokens=0)
    assert (found.text, found.live, found.packed) == ("", 10, 10)
    assert caches[0].offset == 402


def test_live_tokens_need_not_be_packed(tiny, embedded):
    caches = Arm("safe", replace(CONFIG, evict=None)).caches(tiny)()
    read_text(tiny, [5] * 400, caches, step=64)
    body = caches[0].body_tokens
    assert 300 < body < 400
    assert whereabouts(caches, (body - 8, body + 24)) == (32, 8)
    assert whereabouts(caches, (0, 400)) == (400, body)
