"""Checks every kernel against its reference implementation on small random arrays, on the machine at hand."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import mlx.core as mx

from mlx_tq.codec.formats import CodecOptions, get_format
from mlx_tq.codec.formats.base import dtype_name
from mlx_tq.codec.normalization import KeyNormalization, compute_block_means, compute_key_scale
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import backend, thresholds
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.by_head import attend_by_head
from mlx_tq.kernels.encode import compact, encode
from mlx_tq.kernels.prefill import dequantize, prefill
from mlx_tq.kernels.recall_score import group_queries, recall_score
from mlx_tq.kernels.regions import HeadRows, Regions
from mlx_tq.kernels.score import score
from mlx_tq.kernels.wht import wht

FORMATS = ("fp16", "q8", "tq4", "tq3", "tq2", "tcq4", "tcq3", "tcq2")
SORTED = ("stcq4", "stcq2")  # of keys only, whose dims are a multiple of 32
DIMS = (64, 80, 128, 256)
DTYPES = (mx.float16, mx.bfloat16, mx.float32)
KV_HEADS = (2, 1, 4)  # mlx puts small arrays elsewhere, so that one or two heads can fail alone
_TOKENS, _GROUP = 97, 4


@dataclass(frozen=True)
class KernelCheck:
    """The largest difference of a kernel from its reference in one case, relative to the largest value."""

    kernel: str
    case: str
    difference: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.allowed


# A CPU has fewer kernels; `prefill` is one there alone.
CPU_KERNELS = ("encode", "attend", "attend_by_head", "prefill", "score", "recall_score")
Case = tuple[str, str, Callable[[], list[mx.array]]]  # a kernel, what it is given, and the call


def check_kernels(name: str, cases: Iterable[Case] | None = None) -> Iterator[KernelCheck]:
    """Run all kernels of a backend, "metal", "cuda" or "cpu", or those of `cases`."""
    for kernel, case, call in kernel_cases(name) if cases is None else cases:
        yield _compare(name, kernel, case, call)


def kernel_cases(backend_name: str) -> Iterator[Case]:
    """Yield what a backend's kernels are compared in."""
    for kernel, case, call in _all_cases():
        if kernel in CPU_KERNELS if backend_name == "cpu" else kernel != "prefill":
            yield kernel, case, call


def _all_cases() -> Iterator[Case]:
    for number, key in enumerate((*FORMATS, *SORTED)):
        for dim, dtype in zip(DIMS, (DTYPES * 2)[number % 3 :], strict=False):
            if dim % get_format(key).multiple:
                continue
            turn = number + DIMS.index(dim)
            value, heads = FORMATS[turn % len(FORMATS)], KV_HEADS[turn % len(KV_HEADS)]
            for normalized in (False, True):
                case = f"{key}/{value}, D = {dim}, {heads} KV heads, {dtype_name(dtype)}" + ", normalized" * normalized
                for kernel, call in _calls((key, value), dim, heads, dtype, normalized=normalized).items():
                    yield kernel, case, call


def _calls(
    formats: tuple[str, str], dim: int, heads: int, dtype: mx.Dtype, *, normalized: bool
) -> dict[str, Callable[[], list[mx.array]]]:
    key, value = (get_format(name).codec(dim, CodecOptions(seed=seed), dtype) for seed, name in enumerate(formats))
    layout = RowLayout(key, value)

    def random(*shape: int, seed: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(seed))

    keys, values = (random(2, heads, _TOKENS, dim, seed=seed).astype(dtype) for seed in range(2))
    if layout.learned_bytes:
        keys = (keys * mx.exp(random(2, heads, 1, dim, seed=4) / 2)).astype(dtype)
        layout = layout.fit(keys, values)
    first_layout = layout.select_heads(lambda array: array[:1])
    queries = random(2, heads * _GROUP, 2, dim, seed=2).astype(dtype)
    normalization = _normalize(keys, queries, layout) if normalized else None
    with backend.using("reference"):
        rows = encode(keys, values, layout, normalization).rows
    regions = Regions(rows, _TOKENS, layout, keys[:, :, :9], values[:, :, :9], 4, 9, normalization)
    virtual = random(heads, _GROUP, dim, seed=3)
    first = normalization and replace(normalization, scale=normalization.scale[:1], means=normalization.means[:1])
    grouped = group_queries(queries[:1].astype(mx.float32) * dim**-0.5, heads, first_layout, first)
    pairs = mx.arange(dim, dtype=mx.int32).reshape(2, -1)
    rotation = layout.key.rotation

    def attend_with(short_tokens: int) -> list[mx.array]:
        with thresholds.changed(short_tokens=short_tokens):
            return [attend(queries, regions, scale=dim**-0.5, mask="causal")]

    def attend_each_head() -> list[mx.array]:
        index = None if normalization is None else normalization.index
        groups = [
            HeadRows((head,), rows[:1, head : head + 1], _TOKENS // (head + 1), mean_index=index)
            for head in range(heads)
        ]
        full = keys[:1, :, :9], values[:1, :, :9]
        divided = Regions(None, _TOKENS, first_layout, *full, 4, 9, first, groups=tuple(groups))
        with thresholds.changed(short_tokens=0):
            return [attend_by_head(queries[:1], divided, scale=dim**-0.5, mask="causal")]

    calls: dict[str, Callable[[], list[mx.array]]] = {
        "encode": lambda: list(encode(keys, values, layout, normalization)),
        "dequantize": lambda: list(dequantize(regions)),
        "attend": lambda: attend_with(0),
        "prefill": lambda: [prefill(queries, regions, scale=dim**-0.5, mask="causal")],
        "attend_short": lambda: attend_with(2 * _TOKENS),
        "score": lambda: [
            score(rows, _TOKENS, layout, virtual, mx.abs(virtual[..., : dim // 2]), pairs, normalization)
        ],
        "recall_score": lambda: list(
            recall_score(grouped, layout.keys(rows[:1]), first_layout, first, [32, 33, 5, 27])
        ),
        "compact": lambda: [compact(rows, mx.arange(0, _TOKENS, 3, dtype=mx.int32), 64)[:, :, :33]],
    }
    if dim == DIMS[0]:  # the text of `attend`, compiled for several sources
        calls["attend_by_head"] = attend_each_head
    if rotation is not None:
        calls["wht"] = lambda: [wht(queries, rotation, normalization=normalization), wht(keys, rotation, inverse=True)]
    return calls


def _normalize(keys: mx.array, queries: mx.array, layout: RowLayout) -> KeyNormalization:
    """Return a normalization in which nine rows share a mean, as after an eviction."""
    key_rms, query_rms = (mx.sqrt(mx.square(x.astype(mx.float32)).mean(axis=2)) for x in (keys, queries))
    scale = compute_key_scale(key_rms, query_rms)
    means = compute_block_means(keys[:, :, ::9, None], scale, layout.key.rotation).means
    return KeyNormalization(scale, means, mx.arange(_TOKENS, dtype=mx.int32) // 9)


def _compare(name: str, kernel: str, case: str, call: Callable[[], list[mx.array]]) -> KernelCheck:
    with backend.using(name):
        results = call()
        mx.eval(results)
    # On a CPU, because CUDA multiplies float32 in TF32 by default.
    with backend.using("reference"), mx.stream(mx.cpu):
        expected = call()
    differences, allowed = [], 0.0
    for a, b in zip(results, expected, strict=True):
        if a.dtype in (mx.uint32, mx.int32):  # the share that differs
            differences.append(float((a != b).astype(mx.float32).mean()))
            continue
        allowed = 2e-5 + 2 * float(mx.finfo(a.dtype).eps)  # of computing in fp32, and of rounding to the dtype
        a, b = a.astype(mx.float32), b.astype(mx.float32)
        differences.append(float(mx.abs(a - b).max() / mx.abs(b).max()))
    return KernelCheck(kernel, case, max(differences), allowed)
