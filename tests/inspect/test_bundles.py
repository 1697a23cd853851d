"""Reading the compiler's text: what is understood, and that the rest is refused by name."""

import pathlib
import re

import pytest

from trencadis.inspect import bundles
from trencadis.inspect.bundles import UnknownSchedule, Vmem, parse, parse_vmem, programs, read

pytestmark = pytest.mark.core

PATH = pathlib.Path("dump/7-k.1-05-final_bundles.txt")
TEXT = """\
= control target key start
LB: loop body
= control target key end

     0   :  { %s5_s1 = smov 0  ;;  %s9_s0 = inlined_call_operand.hbm [shape: f32[8,128], index: 0, kind: input] }
   0x1 LB: > { %s7_s2 = sadd.s32 1, %s5_s1 /* comment ;; of two
lines */  ;;  %12 = dma.hbm_to_vmem (%p3_p1), [thread:$0]  /*hbm=*/%s9_s0, /*size_in_granules=*/8 } /* Start region 2 */
   0x2   : > { %13 = sst [smem:[#allocation4]] (!%p3_p1), %s7_s2 } /* End region 2 :: Start/End empty region 3 */
   0x3   :  {} /* exit bundle: %k.1 = custom-call() */
"""


def test_bundles():
    first, second, third, last = parse(TEXT, PATH)
    assert [b.address for b in (first, second, third, last)] == [0, 1, 2, 3]
    assert [b.starts for b in (first, second, third, last)] == [(), (2,), (3,), ()]
    assert [b.exits for b in (first, second, third, last)] == [False, False, False, True]
    assert [b.line for b in (first, second, third, last)] == [5, 6, 8, 9]
    assert last.instructions == ()
    assert [x.writes for x in first.instructions] == ["s1", "s0"]
    add, dma = second.instructions
    assert (add.op, add.root, add.reads, add.predicate) == ("sadd.s32", "sadd", ("s1",), None)
    assert (dma.predicate, dma.reads, dma.writes) == ("%p3_p1", ("p1", "s0"), None)
    assert "hbm=%s9_s0" in dma.rest and "size_in_granules=8" in dma.rest
    assert third.instructions[0].predicate == "!%p3_p1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no line looks like a bundle"),
        ("some other text\n", "no line looks like a bundle"),
        ("0x0 : { %1 = vnop\n0x1 : {}", "the bundle at 0x0 has no closing brace"),
        ("0x0 : {}\n0x1 : { vnop }", "not an instruction: 'vnop'"),
    ],
)
def test_what_is_not_a_schedule(text, message):
    with pytest.raises(UnknownSchedule, match=message) as error:
        parse(text, PATH)
    assert str(PATH) in str(error.value) and f"libtpu {bundles.libtpu_version()}" in str(error.value)


def test_an_error_names_the_line():
    with pytest.raises(UnknownSchedule, match=re.escape(f"{PATH}:2")):
        parse("0x0 : {}\n0x1 : { vnop }", PATH)


def test_vmem():
    line = "#allocation{} [shape = 'u8[8]', space={}, size = {}, offset = {}, scoped, tag = '{}']\n"
    text = (
        line.format("1", "vmem", "0x100", "0x400", "input")
        + line.format("2_spill", "vmem", "0x80", "0x500", "spilled vreg")
        + line.format("3", "smem", "0x4000", "0", "prefetched")
    )
    assert parse_vmem(text) == Vmem(bytes=0x580, spill_bytes=0x80)
    assert parse_vmem("") == Vmem()


@pytest.fixture
def dump(tmp_path):
    for label, text in {
        "02-post-delay-converter": "",
        "04-schedule-analysis_final_bundles": "total scheduled bundles:    4\n",
        "05-final_bundles": TEXT,
    }.items():
        (tmp_path / f"7-k.1-{label}.txt").write_text(text)
    (tmp_path / "7-TLP-05-final_bundles.txt").write_text("")
    (tmp_path / "7-<late-finalization>-05-final_bundles.txt").write_text("")
    return tmp_path


def test_programs_of_a_dump(dump):
    ((name, path),) = programs(dump).items()
    schedule = read(name, path)
    assert (name, schedule.name, len(schedule.bundles), schedule.is_kernel) == ("k.1", "k.1", 4, False)


@pytest.mark.parametrize(
    ("label", "text", "message"),
    [
        ("04-schedule-analysis_final_bundles", "total scheduled bundles: 5", "4 bundles were read, of 5"),
        ("04-schedule-analysis_final_bundles", "all is well", "no total of scheduled bundles"),
        ("02-post-delay-converter", None, "there is no file"),
    ],
)
def test_a_dump_that_does_not_fit_together(dump, label, text, message):
    file = dump / f"7-k.1-{label}.txt"
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(UnknownSchedule, match=message):
        read(*next(iter(programs(dump).items())))


def test_a_file_of_another_name(tmp_path):
    (tmp_path / "k-final_bundles.txt").write_text("")
    with pytest.raises(UnknownSchedule, match="want a name such as"):
        programs(tmp_path)
