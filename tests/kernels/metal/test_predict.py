"""Predictions of attention: machine code is read right, and the arithmetic equals what was computed by hand."""

import json

import pytest

from benchmarks.kernels.predict import FILE, compile_attend
from benchmarks.kernels.roofline import H100, Chip, Launch, predict, predict_warps, resident_warps
from benchmarks.kernels.sass import compile_kernels, count_kinds, find_tool, parse
from benchmarks.kernels.token_loop import TokenCost
from benchmarks.reports import RESULTS

needs_compiler = pytest.mark.skipif(
    not (find_tool("nvcc") and find_tool("nvdisasm")), reason="needs nvcc and nvdisasm: pip install '.[nvcc]'"
)

# What nvdisasm prints of a loop in a loop, with a slow path of BRA.DIV after the end.
LISTING = """
.text.sum:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   IMAD.MOV.U32 R2, RZ, RZ, RZ ;
.L_x_1:
        /*0020*/                   MOV R3, RZ ;
.L_x_2:
        /*0030*/                   LDG.E.64 R4, desc[UR4][R8.64] ;
        /*0040*/                   FFMA R2, R4, R5, R2 ;
        /*0050*/              @!P0 BRA `(.L_x_2) ;
        /*0060*/                   BRA.DIV UR4, `(.L_x_3) ;
        /*0070*/                   SHFL.BFLY PT, R6, R2, 0x10, 0x1f ;
.L_x_4:
        /*0080*/               @P1 BRA `(.L_x_1) ;
        /*0090*/                   STG.E desc[UR4][R8.64], R2 ;
        /*00a0*/                   EXIT ;
.L_x_3:
        /*00b0*/                   NOP ;
        /*00c0*/                   BRA `(.L_x_4) ;
"""


def test_machine_code_is_parsed():
    (program,) = parse(LISTING).values()
    outer, inner = program.loops
    assert program.innermost() == [inner]
    code = program.code(inner.blocks)
    assert count_kinds(code) == {"global load": 1, "float": 1, "branch": 1}
    assert code[0].width == 8
    assert code[0].written == {"R4", "R5"}
    assert code[1].read == {"R4", "R5", "R2"}
    assert [each.opcode for each in program.code(outer.blocks - inner.blocks)] == ["MOV", "BRA.DIV", "SHFL.BFLY", "BRA"]


@needs_compiler
def test_a_small_kernel_has_its_loop():
    text = (
        "[[kernel]] void sums(\n  const device float* numbers [[buffer(0)]],\n  device float* sums [[buffer(1)]]) {\n"
        '  float sum = 0;\n  _Pragma("unroll 1") for (int i = 0; i < 64; i++) sum += numbers[32 * i + threadIdx.x];\n'
        "  sums[threadIdx.x] = sum;\n}\n"
    )
    (compiled,) = compile_kernels([text])
    (loop,) = compiled.program.innermost()
    kinds = count_kinds(compiled.program.code(loop.blocks))
    assert (kinds["global load"], kinds["float"], kinds["branch"]) == (1, 1, 1)
    assert compiled.registers > 0
    assert (compiled.spilled, compiled.shared) == (0, 0)


@needs_compiler
def test_instructions_of_a_token_are_those_counted_by_hand():
    """D 128, four query rows, tq4: a lane decodes the key of a token, then its four dims of 32 tokens."""
    (kernel,) = compile_attend([(128, 4, ("tq4", "tq4"))]).values()
    kinds, queries, tables, weights = kernel.cost.instructions, 128, 64 + 64, 32
    assert kinds["shared load"] == queries + tables + weights
    assert kinds["global load"] == 16 + 32 + 2  # words of the key, of values, scales
    assert kinds["shuffle"] == 4 * 5  # the maximum of each row
    assert 0 <= kinds["float"] - 2 * 4 * 128 <= 40  # the rest is softmax and gains
    assert kernel.cost.cycles < 0.6 * kernel.rolled.cycles
    assert kernel.compiled.spilled == 0


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "warps"),
    [
        (32, 0, 1024, 64),
        (32, 0, 32, 32),  # 32 blocks
        (64, 0, 256, 32),
        (128, 0, 128, 16),
        (255, 0, 256, 8),
        (80, 4608, 32, 24),  # six a scheduler
        (72, 0, 128, 28),  # 72 registers are 9 units of 256: seven warps a scheduler
        (32, 100 * 1024, 256, 16),  # two blocks
        (32, 114 * 1024, 256, 8),  # a block takes 1 KB more
        (32, 227 * 1024, 1024, 32),
    ],
)
def test_warps_that_an_sm_has_room_for(registers, shared, threads, warps):
    assert resident_warps(registers, shared, threads) == warps


def test_the_larger_time_bounds():
    chip = Chip(cores=10, clock=1e9, bandwidth=100e9)
    assert predict(chip, 85e9, 0.5 * 1280e9) == (1.0, "memory")
    assert predict(chip, 85e9, 2 * 1280e9) == (2.0, "arithmetic")


def test_warps_wait_for_loads_or_for_each_other():
    assert Launch.of(65536, 8, 1) == (2048, 8)  # 256 blocks of 256 tokens
    assert Launch.of(100, 8, 1) == (16, 2)  # two blocks of 64
    assert Launch.of(65536, 4, 2) == (2048, 4)
    cost, second = TokenCost({"float": 400}, 8000), H100.clock
    alone = predict_warps(H100, Launch(132, 10), cost, 1, 16)
    assert (round(alone.seconds * second), alone.bound) == (80000, "latency")
    many = predict_warps(H100, Launch(132 * 16, 10), cost._replace(cycles=1000), 1, 16)
    assert (round(many.seconds * second), many.bound) == (400 * 10 * 16 // 4, "arithmetic")
    waves = predict_warps(H100, Launch(132 * 32, 10), cost, 1, 16)
    assert round(waves.seconds * second) == 2 * 80000


def test_predictions_are_within_a_third_of_what_an_h200_measured():
    rows = json.loads((RESULTS / FILE).read_text(encoding="utf-8"))["h200"]
    assert len(rows) == 12
    assert all(0.7 < row["predicted"] / row["measured"] < 1.34 for row in rows)
