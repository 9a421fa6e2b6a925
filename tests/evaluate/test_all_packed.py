import numpy as np
import pytest

from mlx_tq.cli.inputs import load_text
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.all_packed import score_all_packed
from mlx_tq.evaluate.arms import OFF, parse_arm
from mlx_tq.evaluate.teacher_forced import cut_chunks, score_text

LENGTH = 160
ALL = {"sinks": 0, "window": 0}


@pytest.fixture(scope="module")
def chunks(embedded):
    return cut_chunks(embedded[1], load_text(), 2, LENGTH)


def test_every_token_is_read_packed_by_itself_and_by_all_later_ones(exact, chunks):
    arms = [OFF, parse_arm("q8/q8", **ALL), parse_arm("tq3:plain/tq3", **ALL)]
    reference, control, q8, tq3 = score_all_packed(exact[0], chunks, arms)
    assert {len(score.kld) for score in (reference, control, q8, tq3)} == {2 * (LENGTH - 1)}
    assert (control.packed, q8.packed, tq3.packed) == (0, 1, 1)
    assert 0 < control.kld.mean() < 1e-10
    assert tq3.kld.mean() > 30 * q8.kld.mean() > 0
    assert tq3.kld[0] > 1e-4, "the first token attends to nothing but itself"
    assert tq3.nbytes < q8.nbytes < control.nbytes
    (_, recent) = score_text(exact[0], chunks, arms[2:], 32)
    later = np.concatenate([tq3.kld[32 : LENGTH - 1], tq3.kld[LENGTH + 31 :]])
    assert later.mean() > 1.5 * recent.kld.mean(), "which reads the last tokens in full precision"


@pytest.mark.full
def test_the_reference_does_not_depend_on_the_tokens_after_a_piece(exact, chunks):
    together, _ = score_all_packed(exact[0], chunks, [OFF])
    alone, _ = score_all_packed(exact[0], chunks[:1], [OFF])
    np.testing.assert_allclose(together.nll[: LENGTH - 1], alone.nll, atol=1e-3)


def test_what_leaves_tokens_unpacked_is_refused(exact, chunks):
    for name, changes, message in (
        ("q8/q8", {"sinks": 0, "window": 128}, "leaves some of 160 unpacked"),
        ("q8/q8", {"sinks": 4, "window": 0}, "leaves some of 160 unpacked"),
        ("small@50%", ALL, "evicts"),
    ):
        with pytest.raises(ConfigError, match=message):
            score_all_packed(exact[0], chunks, [parse_arm(name, **changes)])
