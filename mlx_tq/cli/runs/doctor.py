"""The work of `mlx_tq.doctor`: self-tests, or what fits into a memory."""

import argparse
import json
import sys
from dataclasses import asdict, dataclass

import mlx.core as mx
import numpy as np

from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.cli.environment import environment
from mlx_tq.cli.runs import capacity
from mlx_tq.cli.screen import results, table
from mlx_tq.codec import CodecOptions, TurboQuant, format_names, get_format
from mlx_tq.config import KVConfig
from mlx_tq.errors import ConfigError, KernelUnavailableError
from mlx_tq.kernels import backend, selftest
from mlx_tq.kernels.selftest import KernelCheck

_DIM = 128


@dataclass(frozen=True)
class Check:
    """One self-test: what was measured, what was expected, and whether they agree."""

    name: str
    measured: str
    expected: str
    passed: bool


def check_quantizer(bits: int) -> Check:
    """Distortion of the quantizer against its theory."""
    result = TurboQuant(_DIM, bits).validate()
    return Check(
        f"TurboQuant {bits} bit",
        f"MSE {result.mse:.5f}",
        f"{result.theory:.5f} within 1 %",
        abs(result.deviation) < 0.01,
    )


def check_format(name: str) -> Check:
    """Round trip of a format, and its bytes."""
    fmt = get_format(name)
    codec = fmt.codec(_DIM, CodecOptions())
    vectors = mx.array(np.random.default_rng(0).standard_normal((4096, _DIM)).astype(np.float32)).astype(mx.float16)
    encoded = codec.encode(vectors)
    exact = vectors.astype(mx.float32)
    error = float(np.array(mx.square(codec.decode(encoded) - exact).sum() / mx.square(exact).sum()))
    limit = 1.05 * fmt.error
    size = encoded.codes[0].nbytes + (encoded.scale[0].nbytes if encoded.scale is not None else 0)
    passed = error <= limit and size == fmt.bytes_per_vector(_DIM)
    return Check(
        name, f"error {error:.2g}, {size} bytes", f"at most {limit:.2g}, {fmt.bytes_per_vector(_DIM)} bytes", passed
    )


def check_attention() -> Check:
    """Attention over a compressed cache against attention over the decoded cache."""
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
    """Each kernel's worst case against its twin.

    Raises:
        KernelUnavailableError: there is no GPU, kernels were not chosen, or its compiler refuses one.
    """
    if backend.current() == "reference":
        raise KernelUnavailableError(
            f"--kernels needs a GPU; what computes here is {backend.describe()}. Run it on a Mac or with mlx for CUDA."
        )
    worst: dict[str, KernelCheck] = {}
    for check in selftest.check_kernels(backend.current()):
        known = worst.get(check.kernel)
        if known is None or check.difference - check.allowed > known.difference - known.allowed:
            worst[check.kernel] = check
    return [
        Check(f"kernel {c.kernel}", f"{c.difference:.1e} ({c.case})", f"at most {c.allowed:.1e}", c.passed)
        for c in worst.values()
    ]


def all_checks(*, kernels: bool) -> list[Check]:
    """Every self-test, with those of the GPU's `kernels` where they are asked for; raises as `check_kernels`."""
    checks = [check_quantizer(bits) for bits in (1, 2, 3, 4)]
    checks += [check_format(name) for name in format_names()]
    checks.append(check_attention())
    return [*checks, *check_kernels()] if kernels else checks


def run(args: argparse.Namespace) -> int:
    """Test and show; returns 1 if a test failed.

    Raises:
        ConfigError: flags of --capacity without it, or of the self-tests with it.
    """
    if args.capacity and args.kernels:
        raise ConfigError("--capacity counts and --kernels tests. Give one of the two.")
    if args.capacity:
        return capacity.run(args)
    if (args.model, args.memory, args.dtype) != (None, None, None) or args.dequantize or args.trust_remote_code:
        raise ConfigError(
            "--model, --memory, --dtype, --dequantize and --trust-remote-code say what --capacity counts; add it, or "
            "drop them."
        )
    checks = all_checks(kernels=args.kernels)
    about = environment()
    if args.json:
        sys.stdout.write(json.dumps({"environment": about, "checks": [asdict(check) for check in checks]}) + "\n")
    else:
        for name, value in about.items():
            sys.stdout.write(f"{name:9} {value}\n")
        shown = table("", "self-test", "measured", "expected", "")
        for check in checks:
            shown.add_row(check.name, check.measured, check.expected, "ok" if check.passed else "FAILED")
        results.print(shown)
    return 0 if all(check.passed for check in checks) else 1
