import numpy as np
import pytest

from mlx_tq.cli.needles.haystack import load_text
from mlx_tq.evaluate.passes import cut_chunks
from mlx_tq.evaluate.recording import record
from mlx_tq.evaluate.spectrum import SpectrumRow, measure_spectrum, schedules


def test_shares_are_those_of_the_models_keys(tiny, embedded):
    (ids,) = cut_chunks(embedded[1], load_text(), 1, 100)
    rows = measure_spectrum(tiny, ids)
    assert [row.layer for row in rows] == [0, 1]
    for row, layer in zip(rows, record(tiny, ids, 1), strict=True):
        keys = np.array(layer.keys, np.float64)
        energy = np.sort(keys[..., :16] ** 2 + keys[..., 16:] ** 2, axis=-1)[..., ::-1]
        for count, share in row.shares.items():
            assert share == pytest.approx((energy[..., :count].sum(-1) / energy.sum(-1)).mean(), rel=1e-4)
        assert row.shares[16] == pytest.approx(1)


def test_a_schedule_takes_the_fewest_pairs_that_hold_the_share():
    rows = [
        SpectrumRow(0, {8: 0.9, 10: 0.92, 12: 0.94, 14: 0.96, 16: 0.97}),
        SpectrumRow(1, {8: 0.3, 10: 0.4, 12: 0.5, 14: 0.6, 16: 0.7}),
    ]
    assert schedules(rows) == {
        "lean": "spectral8+spectral12",
        "even": "spectral8+spectral16",
        "rich": "spectral8+tq4",
    }
