"""The kernels' text before other compilers: clang's check of address spaces, and NVIDIA's compiler."""

import re
import shutil
import subprocess
from functools import cache, partial
from unittest import mock

import mlx.core as mx
import pytest
from cases import make_problem
from dialects import cuda, opencl
from simulated import captured

from mlx_tq.codec.rotation import get_rotation
from mlx_tq.kernels import build, source, thresholds
from mlx_tq.kernels.attend import _attend_gpu
from mlx_tq.kernels.compact import _compact_gpu
from mlx_tq.kernels.dequantize import _dequantize_gpu
from mlx_tq.kernels.encode import _encode_gpu
from mlx_tq.kernels.recall_score import _recall_score_gpu, grouped
from mlx_tq.kernels.score import _score_gpu
from mlx_tq.kernels.thresholds import KernelThresholds
from mlx_tq.kernels.wht import _wht_gpu

MASKED = {"mask": "bool", "sinks": True}
LAYOUTS = {
    "q8 and tq4": {"dims": (128, 128), "dtype": "bfloat16"},
    "tq3 and tq2": {"dims": (192, 80), "key": "tq3", "value": "tq2", "wide": True},
    "fp16 and q8": {"dims": (512, 512), "key": "fp16", "value": "q8", "dtype": "float32", "rule": "ls", **MASKED},
    "tq4 and fp16": {
        "dims": (512, 112),
        "key": "tq4",
        "value": "fp16",
        "dtype": "bfloat16",
        "rule": "matched",
        **MASKED,
    },
    "normalized tq4": {"dims": (128, 128), "key": "tq4", "normalized": "blocks", **MASKED},
    "tcq3 and tcq2": {"dims": (128, 256), "key": "tcq3", "value": "tcq2", "dtype": "bfloat16"},
    "normalized tcq4": {"dims": (256, 256), "key": "tcq4", "value": "tcq4", "normalized": "blocks", **MASKED},
    "normalized fp16": {"dims": (80, 64), "key": "fp16", "dtype": "bfloat16", "normalized": "gaps"},
}


@cache
def texts(dialect: str = "metal") -> dict[str, str]:
    """Generated texts by name; the functions in which dialects differ are those of one."""
    found, written = {}, partial(source.text, where=dialect)

    def add(name, kernel, *arguments):
        with captured() as made, mock.patch.object(build, "text", lambda name, _, **how: written(name, **how)):
            kernel(*arguments)
        found.update({f"{kernel_name} {name}": text for kernel_name, text in made.items()})

    for name, case in LAYOUTS.items():
        problem = make_problem(**{"rule": "raw", "body": 4, "batch": 1, "groups": 4, "length": 1, **case})
        layout, rows = problem.layout, problem.arguments["rows"]
        means = problem.normalization
        add(name, _encode_gpu, *problem.packed, layout, means)
        add(name, _dequantize_gpu, rows, layout, problem.full[0].dtype, problem.full, means)
        virtual = mx.zeros((2, 2, case["dims"][0])), mx.zeros((2, 2, 8)), mx.zeros((2, 8), mx.int32)
        add(name, _score_gpu, rows, 4, layout, *virtual, means)
        asking = grouped(problem.arguments["queries"].astype(mx.float32), 2, layout, means)
        add(name, _recall_score_gpu, asking, layout.keys(rows[:, :, :4]), layout, means, [3, 1])
        for short in (0, 64):
            with thresholds.using(KernelThresholds(short=short)):
                add(name, problem.solve, _attend_gpu)
    for dim in (80, 128, 512):
        add(str(dim), _wht_gpu, mx.zeros((4, dim), mx.bfloat16), get_rotation("wht", dim, 0))
    normalization = make_problem(dims=(64, 64), normalized="blocks").normalization
    asked = partial(_wht_gpu, normalization=normalization)
    add("normalized", asked, mx.zeros((2, 4, 3, 64), mx.float16), get_rotation("wht", 64, 0))
    add("any", _compact_gpu, mx.zeros((1, 2, 9, 33), mx.uint32), mx.arange(8), 8)
    return found


BY_LAYOUT = ("encode", "dequantize", "attend", "merge", "attend_short", "score", "recall_score")
NAMES = [f"{kernel} {name}" for kernel in BY_LAYOUT for name in LAYOUTS]
NAMES += ["compact any", "wht 80", "wht 128", "wht 512", "wht normalized"]
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
        ("attend normalized tq4", "auto index = (", "device int* index = ("),
        ("attend_short q8 and tq4", "auto query = asking", "thread float4* query = asking"),
        ("encode tcq3 and tcq2", "Values values;\nCosts", "thread float* values;\nCosts"),
        ("attend tcq3 and tcq2", "Words words;\nLevels levels;", "Words words;\ndevice const half* levels;"),
        ("dequantize tcq3 and tcq2", "Words words;\nLevels levels;", "Words words;\nthreadgroup half* levels;"),
        ("merge q8 and tq4", "Outputs outputs, Numbers", "threadgroup const float* outputs, Numbers"),
        ("recall_score normalized tq4", "auto mean = key_means", "threadgroup const half* mean = key_means"),
        ("recall_score q8 and tq4", "auto key = key_values", "thread const float* key = key_values"),
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
