"""Blocks, scoreboard, scalar program and copies, on schedules written by hand."""

import pathlib

import pytest

from trencadis.core.devices import CHIPS
from trencadis.inspect.basic_blocks import flow
from trencadis.inspect.bundles import Schedule, UnknownSchedule, Vmem, parse
from trencadis.inspect.scalar_arithmetic import DependsOnUnknown, Unknown, left, operand_of, pointer, smin, sminu, wrap
from trencadis.inspect.scalar_program import input_shapes, translate
from trencadis.inspect.scoreboard import issue_times
from trencadis.inspect.simulator import FREE, SUSTAINED, Simulator

pytestmark = pytest.mark.core

V6E, PATH = CHIPS["v6e"], pathlib.Path("k.txt")


def schedule(*lines):
    text = "\n".join(f"{i:#x} : {line}" for i, line in enumerate(lines))
    return Schedule(name="k", path=PATH, bundles=parse(text, PATH), vmem=Vmem(), is_kernel=True, unfolded={})


def run(*lines, values=None, sustained=SUSTAINED, blocks=10_000):
    made = schedule(*lines)
    program = translate(made, flow(made, V6E), values or {})
    simulator = Simulator(program, V6E, sustained)
    return simulator.run(blocks), simulator, program


def times(*lines, chip=V6E):
    return issue_times(schedule(*lines).bundles, chip)


def test_one_bundle_a_cycle():
    assert times("{}", "{ %1 = vadd.f32 %v1_v1, %v2_v2 }", "{}") == ([0, 1, 2], 3)


def test_a_scalar_load_is_waited_for():
    assert times("{ %s1_s1 = sld [smem:[#allocation1]] }", "{ %s2_s2 = sadd.s32 1, %s1_s1 }")[0] == [0, 6]
    assert times("{ %s1_s1 = sadd.s32 1, %s0_s0 }", "{ %s2_s2 = sadd.s32 1, %s1_s1 }")[0] == [0, 1]


def test_products_wait_for_their_mxu_only():
    one, other = (f"{{ %1 = vmatmul.mubr.bf16.gmra.mrb[0].mxu{u} %v1_v1 }}" for u in (0, 1))
    assert times(one, one, other)[0] == [0, V6E.vmatmul_cycles["bf16"], V6E.vmatmul_cycles["bf16"] + 1]
    assert times(one.replace("bf16", "f32"), one)[0] == [0, V6E.vmatmul_cycles["f32"]]


def test_a_result_is_waited_for():
    product = "{ %1 = vmatmul.mubr.bf16.gmra.mrb[0].mxu0 %v1_v1 }"
    assert times(product, "{ %v2_v2 = vpop.f32.mrb[1].mxu0 }")[0] == [0, V6E.vpop_latency + V6E.vpop_interval]
    assert times(product, "{ %v2_v2 = vpop.trf.xlu0 }")[0] == [0, 1]
    v5e = CHIPS["v5e"]  # its results are a queue
    queue = ["{ %1 = vmatmul.bf16.gmra.mxu2 %v1_v1 }", *["{ %v2_v2 = vpop.f32.mrf.mxu2 }"] * 2]
    assert times(*queue, chip=v5e)[0] == [0, v5e.vpop_latency, v5e.vpop_latency + v5e.vpop_interval]


LOOP = [
    "{ %s1_s1 = smov 0 }",
    "{ %s2_s1 = sadd.s32 1, %s1_s1 } /* Start region 1 */",
    "{ %p1_p0 = scmp.lt.s32.totalorder %s2_s1, 5 }",
    "{ %9 = sbr.rel (%p1_p0) target = $region1 }",
    *["{}"] * 4,
    "{} /* exit bundle: k */",
]


def test_a_loop():
    trace, _, program = run(*LOOP)
    assert [(b.first, b.end) for b in program.flow.blocks] == [(0, 1), (1, 8), (8, 9)]
    assert trace.runs == (1, 5, 1)
    assert trace.cycles == sum(b.cycles * n for b, n in zip(program.flow.blocks, trace.runs, strict=True))
    assert not trace.unfinished and not program.not_understood


def test_a_loop_without_end_is_given_up():
    endless = [line.replace("scmp.lt", "scmp.ge").replace(", 5", ", 0") for line in LOOP]
    assert run(*endless, blocks=50)[0].unfinished


def test_a_branch_out_of_the_program():
    out = LOOP[3].replace("region1", "region8")
    assert run("{ %p1_p0 = scmp.eq.s32.totalorder 0, 0 }", out, *LOOP[4:])[0].runs == (1, 0)
    with pytest.raises(UnknownSchedule, match="region 8, which begins nowhere"):
        run("{}", out, *["{}"] * 5)
    with pytest.raises(UnknownSchedule, match="names no region"):
        run("{}", "{ %9 = sbr.abs 4 }", *["{}"] * 5)


def test_reads_come_before_writes():
    _, simulator, _ = run(
        "{ %s1_s1 = smov 3 ;; %s2_s2 = smov 4 }",
        "{ %s1_s1 = smov %s2_s2  ;;  %s2_s2 = smov %s1_s1 }",
        "{ %3 = sst [smem:[#allocation1]] %s1_s1  ;;  %4 = sst [smem:[#allocation1 + $0x1]] %s2_s2 }",
    )
    assert list(simulator.memory.values()) == [4, 3]


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("sadd.s32 %s8_s8, %s9_s9", 4),
        ("ssub.s32 %s8_s8, %s9_s9", 10),
        ("smul.u32 %s8_s8, 1073741824", -(1 << 30)),
        ("sand.u32 %s9_s9, 15", 13),
        ("sshll.u32 %s8_s8, 30", -(1 << 30)),
        ("sshra.s32 %s9_s9, 1", -2),
        ("sshrl.u32 %s9_s9, 28", 15),
        ("smin.u32 %s8_s8, %s9_s9", 7),
        ("smax.s32 %s8_s8, %s9_s9", 7),
        ("scalar_select predicate=%p8_p8, on_true=1, on_false=2", 1),
        ("smulhi.u32 %s9_s9, 2", 1),
    ],
)
def test_arithmetic(code, value):
    given = ["{ %s8_s8 = smov 7  ;;  %s9_s9 = smov 4294967293 }", "{ %p8_p8 = scmp.gt.s32.totalorder %s8_s8, %s9_s9 }"]
    _, simulator, program = run(*given, f"{{ %s1_s1 = {code} }}", "{ %3 = sst [smem:[#allocation1]] %s1_s1 }")
    assert list(simulator.memory.values()) == [value]
    assert not program.not_understood


def test_division_queues_both():
    lines = [
        "{ %1 = sdivrem.u32 17, 5 /* kDivAndRem */ }",
        "{ %s1_s1 = spop.drf %1 }",
        "{ %s2_s2 = spop.drf %1 }",
        "{ %3 = sst [smem:[#allocation1]] %s1_s1  ;;  %4 = sst [smem:[#allocation1 + $0x1]] %s2_s2 }",
    ]
    assert list(run(*lines)[1].memory.values()) == [3, 2]
    with pytest.raises(UnknownSchedule, match="not divided for"):
        run(*lines[1:])


OPERANDS = (
    "%s1_s1 = inlined_call_operand.hbm [shape: f32[1024,8], index: 1, kind: input, shape index: {}]  ;;  "
    "%s2_s2 = inlined_call_operand.<no memory space> [shape: s32[], index: 0, kind: input, shape index: {}]"
)
GET = "dma.hbm_to_vmem /*hbm=*/%s1_s1, /*size_in_granules=*/{}, /*vmem=*/0, /*dst_syncflagno=*/[#allocation9]"


def test_a_copy_takes_latency_and_bandwidth():
    lines = [f"{{ {OPERANDS} }}", f"{{ %7 = {GET.format(1024)} }}", "{ %8 = dma.done.wait [#allocation9], 1024 }"]
    trace, _, program = run(*lines)
    assert (trace.bytes_in, trace.bytes_out, trace.copies, trace.unmet) == (32768, 0, 1, 0)
    assert trace.cycles == int(1 + V6E.dma_in + 32768 / (V6E.hbm * SUSTAINED / V6E.clock) + 1)
    assert input_shapes(program.schedule) == {1: "f32[1024,8]", 0: "s32[]"}
    free = run(*lines, sustained=FREE)[0]
    assert free.cycles == 1 + V6E.dma_in + 1
    two = run(lines[0], lines[1], lines[1], "{ %8 = dma.done.wait [#allocation9], 2048 }")[0]
    assert two.cycles - trace.cycles == pytest.approx(32768 / (V6E.hbm * SUSTAINED / V6E.clock), abs=2)


def test_a_wait_for_nothing_is_told():
    assert run("{ %8 = dma.done.wait [#allocation9], 1024 }")[0].unmet == 1


COUNT = ["{ %7 = vsyncmov [#allocation9] }", "{ %s5_s5 = vpop.sfrf %7 }", "{ %8 = sst [smem:[#allocation1]] %s5_s5 }"]


def test_a_flag_is_read():
    get = [f"{{ {OPERANDS} }}", f"{{ %9 = {GET.format(1024)} }}"]
    done = ["{ %8 = dma.done.wait [#allocation9], 1024 }", "{ %9 = vsyncadd [#allocation9], 4294966272 }"]
    for lines, count in (([*get], 0), ([*get, done[0]], 1024), ([*get, *done], 0)):
        _, simulator, program = run(*lines, *COUNT)
        assert list(simulator.memory.values()) == [count] and not program.not_understood


def test_a_program_may_wait_by_reading_a_flag():
    lines = [
        f"{{ {OPERANDS} }}",
        f"{{ %9 = {GET.format(1024)} }}",
        "{ %7 = vsyncmov [#allocation9] } /* Start region 1 */",
    ]
    turn = "{ %p1_p0 = scmp.lt.s32.totalorder %s5_s5, 1024 }", LOOP[3], *LOOP[4:]
    trace, _, _ = run(*lines, COUNT[1], *turn, values={0: [0]})
    there = 1 + V6E.dma_in + 32768 / (V6E.hbm * SUSTAINED / V6E.clock)
    assert there < trace.cycles < there + 30 and trace.runs[1] > 10 and trace.unmet == 0


def test_a_flag_of_another_core_is_not_known():
    """It decides nothing where a program checks, at its end, that all flags are down again."""
    check = "{ %p1_p0 = scmp.ne.s32.totalorder %s5_s5, 0 }", "{ %9 = shalt.err (%p1_p0) }"
    assert not run(*COUNT[:2], *check)[2].not_understood
    with pytest.raises(UnknownSchedule, match="the count of a semaphore"):
        run("{} /* Start region 1 */", *COUNT[:2], check[0], *LOOP[3:])


def test_an_operand_that_is_not_known_is_told():
    assert run(f"{{ {OPERANDS} }}")[0].missing == {0}
    assert run(f"{{ {OPERANDS} }}", values={0: [3]})[0].missing == frozenset()


def test_what_is_not_understood_counts():
    _, _, program = run("{ %s1_s1 = sfrobnicate 3 }", "{ %s2_s2 = sadd.s32 1, %s1_s1 }")
    assert program.not_understood == {"sfrobnicate": 1}


@pytest.mark.parametrize(
    "use",
    [
        "%9 = sbr.rel (%p1_p0) target = $region1",
        "%9 = dma.done.wait (%p1_p0), [#allocation9], 1",
        "%9 = dma.done.wait [#allocation9], %s2_s2",
        "%9 = sst [smem:[%s2_s2]] 1",
        "%s3_s3 = sld [smem:[#allocation1 + %s2_s2]]",
        f"%9 = {GET.format('%s2_s2')}",
    ],
)
def test_what_is_not_understood_may_not_decide(use):
    lines = ["{ %s1_s1 = sfrobnicate 3 } /* Start region 1 */", "{ %s2_s2 = sadd.s32 1, %s1_s1 }"]
    with pytest.raises(UnknownSchedule, match=r"cannot be followed.*sfrobnicate\n  in k.txt:1"):
        run(*lines, "{ %p1_p0 = scmp.lt.s32.totalorder %s2_s2, 5 }", f"{{ {use} }}", *["{}"] * 5)


def test_what_is_not_known_may_be_kept():
    """A store or a register under a predicate that is not known decides nothing by itself."""
    run(
        "{ %s1_s1 = spop %v }",
        "{ %p1_p0 = scmp.lt.s32.totalorder %s1_s1, 5 }",
        "{ %p2_p1 = pnand %p1_p0, %p1_p0  ;;  %3 = sst [smem:[#allocation1]] (%p1_p0), 7 }",
        "{ %s3_s3 = smov (!%p1_p0), 4  ;;  %s4_s4 = smin.u32 %s1_s1, 3 }",
    )


def test_words():
    assert wrap((1 << 31) + 5) == 5 - (1 << 31) and wrap(-5) == -5
    assert operand_of(left(pointer(7) + 16, 4)) == operand_of(pointer(7) + 16) == 7
    unknown = Unknown("x", 1)
    for value in (wrap(unknown), left(unknown, 2), left(2, unknown), smin(3, unknown), sminu(unknown, 3), 3 - unknown):
        assert value is unknown
    for decide in (bool, hash, int, float):
        with pytest.raises(DependsOnUnknown):
            decide(unknown)
