"""The gate drafts where predictions are right and passes cheap, and stops where they are not."""

from mlx_tq.speculative.draft_gate import MAX_ROWS, DraftGate


def gate(*, right, row_cost, predictions=50):
    """Return a gate after predictions of which a share was right, and passes of 8 tokens."""
    made = DraftGate()
    for number in range(predictions):
        made.note_prediction(8, is_right=number % 10 < 10 * right)
        made.note_plain_step(1.0)
    if row_cost is not None:
        made.note_verify_pass(MAX_ROWS, 1 + row_cost * (MAX_ROWS - 1))
    return made


def test_right_predictions_are_drafted_as_far_as_a_pass_goes():
    assert gate(right=1.0, row_cost=0.05).best_length(8, 20) == MAX_ROWS - 1
    assert gate(right=1.0, row_cost=0.05).best_length(8, 4) == 4


def test_drafts_are_shorter_where_they_are_wrong_more_often():
    often, seldom = (gate(right=share, row_cost=0.2).best_length(8, 7) for share in (0.9, 0.5))
    assert MAX_ROWS - 1 >= often > seldom > 0
    assert gate(right=0.1, row_cost=0.2).best_length(8, 7) == 0


def test_nothing_is_drafted_where_each_token_of_a_pass_takes_as_long_as_a_step():
    assert gate(right=1.0, row_cost=1.2).best_length(8, 7) == 0


def test_nothing_is_drafted_before_a_prediction_was_right():
    made = DraftGate()
    assert made.best_length(8, 7) == 0
    made.note_prediction(8, is_right=True)
    assert made.best_length(8, 7) > 0


def test_the_first_pass_is_short():
    assert 0 < gate(right=1.0, row_cost=None).best_length(8, 7) < 3


def test_a_pass_that_compiles_kernels_does_not_end_drafts():
    compiling, compiled = DraftGate(first_compiles=True), DraftGate()
    for made in (compiling, compiled):
        made.note_prediction(8, is_right=True)
        made.note_plain_step(1.0)
        made.note_verify_pass(3, 50.0)
    assert compiled.best_length(8, 7) == 0 < compiling.best_length(8, 7)
    compiling.note_verify_pass(3, 50.0)
    assert compiling.best_length(8, 7) == 0


def test_one_slow_pass_does_not_end_drafts_forever():
    closed = gate(right=1.0, row_cost=1.5)
    assert closed.best_length(8, 7) == 0
    for _ in range(4000):
        closed.note_plain_step(1.0)
    assert closed.best_length(8, 7) > 0


def test_the_gate_opens_when_a_text_begins_to_repeat():
    opened = gate(right=0.0, row_cost=0.2)
    assert opened.best_length(8, 7) == 0
    for _ in range(50):
        opened.note_prediction(8, is_right=True)
    assert opened.best_length(8, 7) > 0
