"""The kernels' text before other compilers: clang's check of address spaces, and NVIDIA's compiler."""

import re
import shutil
import subprocess
from contextlib import contextmanager
from functools import cache, partial
from unittest import mock

import mlx.core as mx
import pytest
from dialects import cuda, opencl
from kernel_cases import make_layout, random
from metal_sim.capture import capture

from mlx_tq.codec.rotation import get_rotation
from mlx_tq.kernels import build, phases, source
from mlx_tq.kernels.attend import _attend_gpu
from mlx_tq.kernels.compact import _compact_gpu
from mlx_tq.kernels.dequantize import _dequantize_gpu
from mlx_tq.kernels.encode import _encode_gpu, encode_ref
from mlx_tq.kernels.phases import Phases
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
def capturing(dialect):
    """The texts of the kernels called meanwhile, by name; their outputs are zeros."""
    texts = {}

    def run(kernel, *, inputs, constants, output_shapes, output_dtypes, **call):
        sizes = {"output_shapes": output_shapes, "output_dtypes": output_dtypes}
        made = build.built.__wrapped__(kernel, "metal", constants)
        texts[kernel.name] = capture(made, list(inputs), **sizes, **call)
        return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

    text = partial(source.text, where=dialect)
    with mock.patch.object(build, "run", run), mock.patch.object(build, "text", lambda name, _: text(name)):
        yield texts


@cache
def texts(dialect: str = "metal") -> dict[str, str]:
    """Generated texts by name; the functions in which dialects differ are those of one."""
    found = {}

    def add(name, kernel, *arguments, **options):
        with capturing(dialect) as captured:
            kernel(*arguments, **options)
        found.update({f"{kernel_name} {name}": text for kernel_name, text in captured.items()})

    for name, case in LAYOUTS.items():
        layout = make_layout(case)
        keys, values = (random((1, 1, 4, case[f"{part}_dim"]), case["dtype"]) for part in ("key", "value"))
        add(name, _encode_gpu, keys, values, layout)
        rows = encode_ref(keys, values, layout).rows
        add(name, _dequantize_gpu, rows, layout, keys.dtype, (keys, values))
        virtual = random((1, 2, case["key_dim"]), "float32"), mx.zeros((1, 2, 8)), mx.zeros((2, 8), mx.int32)
        add(name, _score_gpu, rows, 4, layout, *virtual)
        queries = random((1, 4, 1, case["key_dim"]), case["dtype"])
        options = {"mask": mx.zeros((1, 8)), "sinks": mx.zeros(4)} if "rule" in case else {}
        for short in (0, 8):
            with phases.using(Phases(short=short)):
                add(name, _attend_gpu, queries, rows, 4, layout, keys, values, prefix=1, scale=1.0, **options)
    for dim in (80, 128, 512):
        add(str(dim), _wht_gpu, mx.zeros((4, dim), mx.bfloat16), get_rotation("wht", dim, 0))
    add("any", _compact_gpu, mx.zeros((1, 2, 9, 33), mx.uint32), mx.arange(8), 8)
    return found


BY_LAYOUT = ("encode", "dequantize", "attend", "merge", "attend_short", "score")
NAMES = [f"{kernel} {name}" for kernel in BY_LAYOUT for name in LAYOUTS] + [
    "compact any",
    "wht 80",
    "wht 128",
    "wht 512",
]
SHARED = 32768  # bytes of threadgroup memory that Metal has


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
        ("attend_short q8 and tq4", "auto query = asking", "thread float4* query = asking"),
        ("merge q8 and tq4", "Outputs outputs, Numbers", "threadgroup const float* outputs, Numbers"),
        ("wht 128", "auto vector = vectors", "threadgroup const bfloat16_t* vector = vectors"),
    ],
)
def test_wrong_address_space_is_found(name, old, new):
    text = texts()[name]
    changed = text.replace(old, new)
    assert changed != text
    assert complaints(changed)


@pytest.fixture(scope="module")
def ptxas(tmp_path_factory):
    """What ptxas says of each kernel, all of them in one file: the compiler reads CUDA's headers once."""
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc here: CUDA is not compiled")
    folder = tmp_path_factory.mktemp("cuda")
    source = folder / "kernels.cu"
    source.write_text(cuda([texts("cuda")[name] for name in NAMES]))
    command = ["nvcc", "-arch=sm_90", "-std=c++17", "-cubin", "-Xptxas", "-v", "-o", folder / "cubin", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = re.split(r"Compiling entry function '\w*?kernel_(\d+)_\w*'", done.stderr)
    return {NAMES[int(number)]: words for number, words in zip(said[1::2], said[2::2], strict=True)}


@pytest.mark.parametrize("name", NAMES)
def test_nvcc_compiles_without_spills(name, ptxas):
    registers = int(re.search(r"Used (\d+) registers", ptxas[name]).group(1))
    shared = sum(map(int, re.findall(r"(\d+) bytes smem", ptxas[name])))
    print(f"{name}: {registers} registers, {shared} bytes shared")
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in ptxas[name]
    assert registers <= 128
    assert shared <= SHARED
