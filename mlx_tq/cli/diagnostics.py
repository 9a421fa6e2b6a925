"""Describe and test this machine: versions, codecs, attention and kernels."""

import platform
from dataclasses import dataclass
from importlib.metadata import version

import mlx.core as mx
import numpy as np

from mlx_tq import __version__
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.cli.fast_blas import describe_blas
from mlx_tq.codec import CodecOptions, TurboQuant, format_names, get_format
from mlx_tq.config import KVConfig
from mlx_tq.errors import KernelUnavailableError
from mlx_tq.kernels import backend, selftest, thresholds
from mlx_tq.kernels.gpu import gpu_backend, thread_limits
from mlx_tq.kernels.selftest import KernelCheck

_DIM = 128


@dataclass(frozen=True)
class Check:
    """One self-test: what was measured, what was expected, and whether they agree."""

    name: str
    measured: str
    expected: str
    passed: bool


def run_checks(*, kernels: bool) -> list[Check]:
    """Return the results of all self-tests, those of the kernels only with `kernels`."""
    checks = []
    for bits in (1, 2, 3, 4):
        result = TurboQuant(_DIM, bits).validate()
        measured, expected = f"MSE {result.mse:.5f}", f"{result.theory:.5f} within 1 %"
        checks.append(Check(f"TurboQuant {bits} bit", measured, expected, abs(result.deviation) < 0.01))
    checks += [check_format(name) for name in format_names()]
    checks.append(check_attention())
    return [*checks, *check_kernels()] if kernels else checks


def check_format(name: str) -> Check:
    fmt = get_format(name)
    codec = fmt.codec(_DIM, CodecOptions())
    vectors = mx.array(np.random.default_rng(0).standard_normal((1024, _DIM)).astype(np.float32)).astype(mx.float16)
    encoded = codec.encode(vectors)
    exact = vectors.astype(mx.float32)
    error = float(np.array(mx.square(codec.decode(encoded) - exact).sum() / mx.square(exact).sum()))
    limit, expected_size = 1.05 * fmt.error, fmt.bytes_per_vector(_DIM)
    size = encoded.codes[0].nbytes + (encoded.scale[0].nbytes if encoded.scale is not None else 0)
    measured, expected = f"error {error:.2g}, {size} bytes", f"at most {limit:.2g}, {expected_size} bytes"
    return Check(name, measured, expected, error <= limit and size == expected_size)


def check_attention() -> Check:
    mx.random.seed(0)
    config = KVConfig(key="q8", value="tq4", sinks=32, window=32)
    cache = CompressedKVCache(CacheSpec.for_layer(config, 0, config.key, config.value))
    keys, values = (mx.random.normal((1, 2, 512, _DIM)) for _ in range(2))
    view = cache.append(keys[:, :, :511], values[:, :, :511])
    view = cache.append(keys[:, :, 511:], values[:, :, 511:])
    queries = mx.random.normal((1, 8, 1, _DIM))
    scale = _DIM**-0.5
    expected = mx.fast.scaled_dot_product_attention(queries, *view.materialize(), scale=scale)
    difference = float(np.array(mx.abs(view.attend(queries, scale, None, None) - expected).max()))
    return Check("attention", f"difference {difference:.1e}", "at most 1e-5", difference <= 1e-5)


def check_kernels() -> list[Check]:
    """Return the worst case of each kernel against its reference implementation."""
    if backend.current() == "reference":
        raise KernelUnavailableError(
            f"--kernels checks kernels, and the backend is the {backend.describe()}. Use --backend auto."
        )
    worst: dict[str, KernelCheck] = {}
    for check in selftest.check_kernels(backend.current()):
        previous = worst.get(check.kernel)
        if previous is None or check.difference - check.allowed > previous.difference - previous.allowed:
            worst[check.kernel] = check
    checks = []
    for name, check in worst.items():
        measured, expected = f"{check.difference:.1e} ({check.case})", f"at most {check.allowed:.1e}"
        checks.append(Check(f"kernel {name}", measured, expected, check.passed))
    return checks


def environment() -> dict[str, str]:
    """Return what computes here; "thread limits" are those for which a kernel runs with fewer threads."""
    limits = ", ".join(f"{kernel} {threads}" for kernel, threads in sorted(thread_limits.items()))
    used = gpu_backend() or "cpu"
    name = None if used == "cpu" else mx.device_info().get("device_name")
    return {
        "device": str(name or platform.processor() or platform.machine()),
        "backend": used,
        "blas": describe_blas(),
        "attention": backend.describe(),
        "thresholds": thresholds.table().origin,
        **({"thread limits": limits} if limits else {}),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("mlx", "mlx-lm", "numpy")},
        "mlx_tq": __version__,
    }


def summarize(checks: list[Check], versions: dict[str, str]) -> str:
    """Return a line that says whether all checks passed, and on which backend and versions."""
    failed = sum(not check.passed for check in checks)
    result = f"FAILED: {failed} of {len(checks)} checks" if failed else f"OK: {len(checks)} checks passed"
    names = {"python": "Python"}
    shown = ("backend", "attention", "mlx_tq", "mlx", "mlx-lm", "python")
    return ", ".join([result, *(f"{names.get(name, name)} {versions[name]}" for name in shown)])
