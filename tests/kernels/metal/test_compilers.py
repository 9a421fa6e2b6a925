"""The kernels' text in other compilers: clang checks address spaces, NVIDIA's compiler compiles the CUDA side.

C++ for OpenCL has Metal's address spaces under other names. CUDA is what `mx.fast.cuda_kernel` generates. Both are made
from the text that mlx generates for Metal, CUDA with its own part of tq_compat.h.
"""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest

from kernels.cases import make_problem
from kernels.metal.simulated import captured
from metal_sim.cuda import split_text, to_cuda
from metal_sim.translate import parameters
from mlx_tq.codec.rotation import get_rotation
from mlx_tq.kernels import thresholds
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.encode import compact, encode
from mlx_tq.kernels.prefill import dequantize
from mlx_tq.kernels.recall_score import group_queries, recall_score
from mlx_tq.kernels.score import score
from mlx_tq.kernels.thresholds import KernelThresholds
from mlx_tq.kernels.wht import wht

OPENCL_PRELUDE = Path(__file__).with_name("opencl_prelude.h").read_text()


def opencl(text: str) -> str:
    """Translate a kernel to C++ for OpenCL 2021."""
    header, name, body = split_text(text)
    arguments = [f"{p.type} {p.name}" for p in parameters(text)]
    return "\n".join([OPENCL_PRELUDE, header, f"kernel void {name}({', '.join(arguments)}) {{", body])


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
    "stcq3 and tcq2": {"dims": (128, 128), "key": "stcq3", "value": "tcq2", "dtype": "bfloat16"},
    "normalized stcq4": {
        "dims": (256, 256),
        "key": "stcq4",
        "normalized": "gaps",
        "groups": 8,
        "rule": "unbiased",
        **MASKED,
    },
    "eight rows of tq4": {"dims": (256, 256), "key": "tq4", "groups": 8, "dtype": "bfloat16", "normalized": "gaps"},
    "wide heads of tq2": {"dims": (256, 256), "key": "tq2", "value": "tq2"},
    "eight wide rows": {"dims": (512, 512), "key": "q8", "groups": 8, **MASKED},
    "normalized fp16": {"dims": (80, 64), "key": "fp16", "dtype": "bfloat16", "normalized": "gaps"},
}

# Query rows of a KV head that take products of matrices, which CUDA lacks.
MANY_ROWS = {
    "many rows": {"dims": (128, 128), "key": "tq4", "groups": 16, "dtype": "bfloat16", "normalized": "blocks"},
    "many rows of sorted keys": {"dims": (128, 128), "key": "stcq2", "groups": 16, "normalized": "blocks"},
    "many rows of trellis codes": {"dims": (256, 256), "key": "tcq4", "value": "tcq3", "groups": 16, "length": 2},
}


@cache
def texts(dialect: str = "metal") -> dict[str, str]:
    """Return the generated texts by name, with the functions that differ between dialects from one of them."""
    result = {}

    def add(name, call, *arguments, **options):
        with captured(dialect) as kernels:
            call(*arguments, **options)
        result.update({f"{kernel} {name}": text for kernel, (text, _) in kernels.items()})

    for name, case in LAYOUTS.items():
        problem = make_problem(**{"rule": "raw", "packed": 4, "batch": 1, "groups": 4, "length": 1, **case})
        layout, rows, normalization = problem.layout, problem.rows, problem.normalization
        add(name, encode, *problem.packed, layout, normalization)
        add(name, dequantize, problem.regions())
        pairs = mx.zeros((2, 8), mx.int32)
        add(name, score, rows, 4, layout, mx.zeros((2, 2, case["dims"][0])), mx.zeros((2, 2, 8)), pairs, normalization)
        queries = group_queries(problem.arguments["queries"].astype(mx.float32), 2, layout, normalization)
        add(name, recall_score, queries, layout.keys(rows[:, :, :4]), layout, normalization, [3, 1])
        for short_tokens in (0, 64):
            with thresholds.using(KernelThresholds(short_tokens=short_tokens)):
                add(name, problem.solve, attend)
    if dialect == "metal":
        for name, case in MANY_ROWS.items():
            with thresholds.using(KernelThresholds(short_tokens=0)):
                add(name, make_problem(**{"rule": "raw", "packed": 4, "batch": 1, "length": 1, **case}).solve, attend)
    for dim in (80, 128, 512):
        add(str(dim), wht, mx.zeros((4, dim), mx.bfloat16), get_rotation("wht", dim, 0))
    normalization = make_problem(dims=(64, 64), normalized="blocks").normalization
    vectors, rotation = mx.zeros((2, 4, 3, 64), mx.float16), get_rotation("wht", 64, 0)
    add("normalized", wht, vectors, rotation, normalization=normalization)
    add("any", compact, mx.zeros((1, 2, 9, 33), mx.uint32), mx.arange(8), 8)
    return result


BY_LAYOUT = ("encode", "dequantize", "attend", "merge", "attend_short", "score", "recall_score")
NAMES = [f"{kernel} {name}" for kernel in BY_LAYOUT for name in LAYOUTS]
NAMES += ["compact any", "wht 80", "wht 128", "wht 512", "wht normalized"]
ONLY_METAL = [f"attend_matrix {name}" for name in MANY_ROWS]
THREADGROUP_BYTES = 32768  # limit of Metal


def clang_errors(text: str) -> list[str]:
    """Return the errors of clang for a text in C++ for OpenCL, without generic pointers."""
    clang = pytest.importorskip("clang.cindex", reason="address spaces are checked by libclang")
    missing = ("generic_address_space", "pipes", "device_enqueue", "program_scope_global_variables")
    extensions = ",".join(f"-__opencl_c_{name}" for name in missing)
    flags = ["-x", "clcpp", "-cl-std=CLC++2021", "-cl-no-stdinc", "-target", "spir64", "-w", "-Xclang"]
    unsaved = [("kernel.clcpp", opencl(text))]
    unit = clang.Index.create().parse("kernel.clcpp", args=[*flags, f"-cl-ext={extensions}"], unsaved_files=unsaved)
    return [str(message) for message in unit.diagnostics if message.severity >= clang.Diagnostic.Error]


@pytest.mark.parametrize("name", [*NAMES, *ONLY_METAL])
def test_address_spaces(name):
    assert clang_errors(texts()[name]) == []


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
        ("attend_short q8 and tq4", "auto query = tile_queries", "thread float4* query = tile_queries"),
        ("encode tcq3 and tcq2", "Values values;\nCosts", "thread float* values;\nCosts"),
        ("attend tcq3 and tcq2", "Words words;\nLevels levels;", "Words words;\ndevice const half* levels;"),
        ("dequantize tcq3 and tcq2", "Words words;\nLevels levels;", "Words words;\nthreadgroup half* levels;"),
        ("attend stcq3 and tcq2", "Levels levels;\nGroups groups;", "Levels levels;\nthreadgroup ushort* groups;"),
        ("encode stcq3 and tcq2", "auto groups = key_groups", "threadgroup const ushort* groups = key_groups"),
        ("merge q8 and tq4", "Outputs outputs, Floats", "threadgroup const float* outputs, Floats"),
        ("recall_score normalized tq4", "auto mean = key_means", "threadgroup const half* mean = key_means"),
        ("recall_score q8 and tq4", "auto key = key_values", "thread const float* key = key_values"),
        ("wht 128", "auto vector = vectors", "threadgroup const bfloat16_t* vector = vectors"),
    ],
)
def test_wrong_address_space_is_an_error(name, old, new):
    text = texts()[name]
    changed = text.replace(old, new)
    assert changed != text
    assert clang_errors(changed)


@pytest.fixture(scope="module")
def ptxas(tmp_path_factory):
    """Return the report of ptxas on each kernel; they are one file, so that the compiler reads CUDA's headers once."""
    if not shutil.which("nvcc"):
        pytest.skip("needs nvcc")
    folder = tmp_path_factory.mktemp("cuda")
    source = folder / "kernels.cu"
    source.write_text(to_cuda([texts("cuda")[name] for name in NAMES]))
    command = ["nvcc", "-arch=sm_90", "-std=c++17", "-cubin", "-Xptxas", "-v", "-o", folder / "cubin", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reports = re.split(r"Compiling entry function '\w*?kernel_(\d+)_\w*'", done.stderr)
    return {NAMES[int(number)]: report for number, report in zip(reports[1::2], reports[2::2], strict=True)}


@pytest.mark.parametrize("name", NAMES)
def test_nvcc_compiles_without_spills(name, ptxas):
    registers = int(re.search(r"Used (\d+) registers", ptxas[name]).group(1))
    shared = sum(map(int, re.findall(r"(\d+) bytes smem", ptxas[name])))
    print(f"{name}: {registers} registers, {shared} bytes shared")
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in ptxas[name]
    # An SM has room for 16 simdgroups with 128 registers, and 12 with 160. Eight rows of wide heads are worth fewer of
    # them: loads ahead take registers, and save more time than the other simdgroups hide.
    assert registers <= (160 if name in ("attend eight wide rows", "attend normalized stcq4") else 128)
    assert shared <= THREADGROUP_BYTES
