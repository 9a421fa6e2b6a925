"""The kernels' text before other compilers: clang's check of address spaces, and NVIDIA's compiler."""

import re
import shutil
import subprocess
from contextlib import contextmanager
from functools import cache
from unittest import mock

import mlx.core as mx
import pytest
from dialects import cuda, opencl
from kernel_cases import make_layout, random
from metal_sim.capture import capture

from mlx_tq.codec.rotation import get_rotation
from mlx_tq.kernels import build
from mlx_tq.kernels.attend import _attend_gpu
from mlx_tq.kernels.compact import _compact_gpu
from mlx_tq.kernels.dequantize import _dequantize_gpu
from mlx_tq.kernels.encode import _encode_gpu, encode_ref
from mlx_tq.kernels.score import _score_gpu
from mlx_tq.kernels.wht import _wht_gpu

LAYOUTS = {
    "q8 and tq4": {"key_dim": 128, "value_dim": 128, "key": "q8", "value": "tq4", "dtype": "bfloat16"},
    "tq3 and tq2": {"key_dim": 192, "value_dim": 80, "key": "tq3", "value": "tq2", "dtype": "float16", "wide": True},
    "fp16 and q8": {"key_dim": 512, "value_dim": 512, "key": "fp16", "value": "q8", "dtype": "float32", "rule": "ls"},
    "tq4 and fp16": {
        "key_dim": 512,
        "value_dim": 112,
        "key": "tq4",
        "value": "fp16",
        "dtype": "bfloat16",
        "rule": "matched",
    },
}


@contextmanager
def capturing():
    """The texts of the kernels called meanwhile, by name; their outputs are zeros."""
    texts = {}

    def run(kernel, *, inputs, template, output_shapes, output_dtypes, **call):
        sizes = {"output_shapes": output_shapes, "output_dtypes": output_dtypes}
        texts[kernel.name] = capture(
            build.built(kernel, "metal"), list(inputs), template=list(template), **sizes, **call
        )
        return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

    with mock.patch.object(build, "run", run):
        yield texts


@cache
def texts() -> dict[str, str]:
    """Generated texts by name."""
    found = {}

    def add(name, kernel, *arguments, **options):
        with capturing() as captured:
            kernel(*arguments, **options)
        found.update({f"{kernel_name} {name}": text for kernel_name, text in captured.items()})

    for name, case in LAYOUTS.items():
        layout = make_layout(case)
        keys, values = (random((1, 1, 4, case[f"{part}_dim"]), case["dtype"]) for part in ("key", "value"))
        add(name, _encode_gpu, keys, values, layout)
        rows = encode_ref(keys, values, layout).rows
        add(name, _dequantize_gpu, rows, layout, keys.dtype)
        virtual = random((1, 2, case["key_dim"]), "float32"), mx.zeros((1, 2, 8)), mx.zeros((2, 8), mx.int32)
        add(name, _score_gpu, rows, 4, layout, *virtual)
        queries = random((1, 4, 1, case["key_dim"]), case["dtype"])
        options = {"mask": mx.zeros((1, 8)), "sinks": mx.zeros(4)} if "rule" in case else {}
        add(name, _attend_gpu, queries, rows, 4, layout, keys, values, prefix=1, scale=1.0, **options)
    for dim in (80, 128, 512):
        add(str(dim), _wht_gpu, mx.zeros((4, dim), mx.bfloat16), get_rotation("wht", dim, 0))
    add("any", _compact_gpu, mx.zeros((1, 2, 9, 33), mx.uint32), mx.arange(8), 8)
    return found


NAMES = [f"{kernel} {name}" for kernel in ("encode", "dequantize", "attend", "merge", "score") for name in LAYOUTS] + [
    "compact any",
    "wht 80",
    "wht 128",
    "wht 512",
]


def complaints(text: str) -> list[str]:
    """What clang says against a text in C++ for OpenCL, with pointers of no address space forbidden."""
    clang = pytest.importorskip("clang.cindex", reason="no libclang here: address spaces are not checked")
    missing = ("generic_address_space", "pipes", "device_enqueue", "program_scope_global_variables")
    extensions = ",".join(f"-__opencl_c_{name}" for name in missing)
    flags = ["-x", "clcpp", "-cl-std=CLC++2021", "-cl-no-stdinc", "-target", "spir64", "-w", "-Xclang"]
    unsaved = [("kernel.clcpp", opencl(text))]
    unit = clang.Index.create().parse("kernel.clcpp", args=[*flags, f"-cl-ext={extensions}"], unsaved_files=unsaved)
    return [str(found) for found in unit.diagnostics if found.severity >= clang.Diagnostic.Error]


@pytest.mark.parametrize("name", NAMES)
def test_address_spaces(name):
    assert complaints(texts()[name]) == []


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("encode q8 and tq4", "auto scratch = codes", "uchar* scratch = codes"),
        ("encode q8 and tq4", "auto out = packed_rows", "thread ushort* out = packed_rows"),
        ("encode q8 and tq4", "TQ_THREAD const float* y, Codes", "TQ_CONSTANT float* y, Codes"),
        ("dequantize q8 and tq4", "auto words = packed_rows", "device ushort* words = packed_rows"),
        ("attend q8 and tq4", "auto vector = queries", "constant bfloat16_t* vector = queries"),
        ("attend q8 and tq4", "auto key = keys", "device ushort* key = keys"),
        ("merge q8 and tq4", "auto outputs = block_outputs", "threadgroup const float* outputs = block_outputs"),
        ("wht 128", "auto vector = vectors", "threadgroup const bfloat16_t* vector = vectors"),
    ],
)
def test_wrong_address_space_is_found(name, old, new):
    text = texts()[name]
    changed = text.replace(old, new)
    assert changed != text
    assert complaints(changed)


@pytest.mark.parametrize("name", NAMES)
def test_nvcc_compiles_without_spills(name, tmp_path):
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc here: CUDA is not compiled")
    source = tmp_path / "kernel.cu"
    source.write_text(cuda(texts()[name]))
    command = ["nvcc", "-arch=sm_90", "-std=c++17", "-cubin", "-Xptxas", "-v", "-o", tmp_path / "cubin", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    registers = int(re.search(r"Used (\d+) registers", done.stderr).group(1))
    print(f"{name}: {registers} registers")
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in done.stderr
    assert registers <= 128
