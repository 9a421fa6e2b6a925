"""Scores of keys on a CPU, for eviction and for recall: score.cpp and recall_score.cpp."""

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import mlx.core as mx
import numpy as np

from mlx_tq.codec.formats import Encoded
from mlx_tq.codec.formats.sorted_pairs import SortedCodec
from mlx_tq.codec.normalization import KeyNormalization
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import arguments
from mlx_tq.kernels.cpu.arrays import Reader, evaluate
from mlx_tq.kernels.cpu.build import run_kernel
from mlx_tq.kernels.cpu.codecs import (
    KeyGroupsStruct,
    RotationStruct,
    format_number,
    groups_struct,
    int32,
    levels_address,
    long,
    pointer,
    rotation_struct,
    thread_count,
)


class _Score(ctypes.Structure):
    """Mirror of the struct in calls.h."""

    _fields_ = (
        ("rows", pointer),
        ("strides", long * 3),
        ("queries", pointer),
        ("weights", pointer),
        ("pair_dims", pointer),
        ("key_scale", pointer),
        ("means", pointer),
        ("mean_index", pointer),
        ("groups", KeyGroupsStruct),
        ("scores", pointer),
        ("levels", pointer),
        ("rotation", RotationStruct),
        ("batch", long),
        ("heads", long),
        ("group", long),
        ("tokens", long),
        ("pairs", long),
        ("mean_count", long),
        ("dim", int32),
        ("format", int32),
        ("scale_offset", int32),
        ("wide_scale", int32),
        ("threads", int32),
        ("padding", int32),
    )


class _RecallScore(ctypes.Structure):
    """Mirror of the struct in calls.h."""

    _fields_ = (
        ("queries", pointer),
        ("codes", pointer),
        ("scales", pointer),
        ("code_stride", long),
        ("code_head_stride", long),
        ("scale_stride", long),
        ("scale_head_stride", long),
        ("mean_scores", pointer),
        ("mean_index", pointer),
        ("starts", pointer),
        ("groups", KeyGroupsStruct),
        ("maxima", pointer),
        ("log_sums", pointer),
        ("levels", pointer),
        ("heads", long),
        ("rows", long),
        ("blocks", long),
        ("means", long),
        ("dim", int32),
        ("format", int32),
        ("wide_scale", int32),
        ("threads", int32),
    )


def launch_score(
    rows: mx.array,
    tokens: int,
    layout: RowLayout,
    queries: mx.array,
    weights: mx.array,
    pairs: mx.array,
    normalization: KeyNormalization | None = None,
) -> mx.array:
    arguments.check_can_run(layout)
    batch, heads = rows.shape[:2]
    arrays = [mx.contiguous(array) for array in (queries, weights, pairs)]
    if normalization is not None:
        index = normalization.mean_index(tokens)
        arrays += [mx.contiguous(array) for array in (normalization.scale, normalization.means, index)]
    evaluate(rows, arrays)
    scores = np.empty((batch, heads, queries.shape[1], tokens), np.float32)
    with Reader() as reader:
        memory = reader.read(rows)
        addresses = [reader.read(array).address for array in arrays]
        call = _Score(
            rows=memory.address,
            strides=(long * 3)(*memory.strides[:3]),
            queries=addresses[0],
            weights=addresses[1],
            pair_dims=addresses[2],
            scores=scores.ctypes.data,
            levels=levels_address(),
            rotation=rotation_struct(layout.key.rotation),
            batch=batch,
            heads=heads,
            group=queries.shape[1],
            tokens=tokens,
            pairs=pairs.shape[1],
            dim=layout.key.head_dim,
            format=format_number(layout.key),
            scale_offset=2 * (layout.key.words + layout.value.words),
            wide_scale=layout.key.scale_dtype is not None and layout.key.scale_dtype == mx.float32,
            threads=thread_count(),
        )
        call.groups = groups = groups_struct(layout.key, batch, heads)
        if normalization is not None:
            call.key_scale, call.means, call.mean_index = addresses[3:]
            call.mean_count = normalization.means.shape[2]
        run_kernel("score", call)
        del groups
    return mx.array(scores)


def launch_recall_score(
    queries: mx.array, keys: Encoded, layout: RowLayout, normalization: KeyNormalization | None, sizes: Sequence[int]
) -> tuple[mx.array, mx.array]:
    """Return the largest score of each block, and the log-sum-exp of all, as `RecallScores` has them."""
    arguments.check_can_run(layout)
    heads, tokens = keys.codes.shape[1:3]
    count = queries.shape[2]
    arrays = [mx.contiguous(queries[0])]
    if normalization is not None:
        mean_scores = arrays[0] @ normalization.means[0].astype(mx.float32).swapaxes(-1, -2)
        arrays += [mx.contiguous(mean_scores), mx.contiguous(normalization.mean_index(tokens))]
    if isinstance(layout.key, SortedCodec):
        arrays[0] = mx.contiguous(arrays[0] * layout.key.sizes[0])
    evaluate(arrays, *keys)
    starts = np.array([0, *accumulate(sizes)], np.int64)
    maxima, log_sums = (np.empty((heads, count, len(sizes)), np.float32) for _ in range(2))
    with Reader() as reader:
        codes = reader.read(keys.codes)
        scales = codes if keys.scale is None else reader.read(keys.scale)
        addresses = [reader.read(array).address for array in arrays]
        call = _RecallScore(
            queries=addresses[0],
            codes=codes.address,
            scales=scales.address,
            code_stride=codes.strides[2],
            code_head_stride=codes.strides[1],
            scale_stride=scales.strides[2],
            scale_head_stride=scales.strides[1],
            starts=starts.ctypes.data,
            maxima=maxima.ctypes.data,
            log_sums=log_sums.ctypes.data,
            levels=levels_address(),
            heads=heads,
            rows=count,
            blocks=len(sizes),
            dim=layout.key.head_dim,
            format=format_number(layout.key),
            wide_scale=layout.key.scale_dtype is not None and layout.key.scale_dtype == mx.float32,
            threads=thread_count(),
        )
        call.groups = groups = groups_struct(layout.key, 1, heads)
        if normalization is not None:
            call.mean_scores, call.mean_index = addresses[1:]
            call.means = normalization.means.shape[2]
        run_kernel("recall_score", call)
        del groups
    with np.errstate(invalid="ignore"):  # a damaged block may hold NaN
        return mx.array(maxima), mx.array(np.logaddexp.reduce(log_sums, axis=-1))
