"""Reading the text of a compiled module."""

import pytest

from trencadis.tpu.worker import modules_kernels, modules_repeats

pytestmark = pytest.mark.core

TEXT = """\
HloModule jit_call, is_scheduled=true

%until.1 (q.1: (s32[], f32[8])) -> pred[] {
  %five.1 = s32[]{:T(128)} constant(5)
  %q.1 = (s32[]{:T(128)}, f32[8]{0}) parameter(0)
  %at.1 = s32[]{:T(128)} get-tuple-element(%q.1), index=0
  ROOT %lt.1 = pred[]{:T(512)} compare(%at.1, %five.1), direction=LT, metadata={op_name="lt"}
}

%turn.1 (p.1: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.1 = (s32[]{:T(128)}, f32[8]{0}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  %x.1 = f32[8]{0} get-tuple-element(%p.1), index=1
  %two.1 = s32[]{:T(128)} constant(2)
  %next.1 = s32[]{:T(128)} add(%i.1, %two.1)
  %inner.1 = f32[8]{0} while(%x.1), condition=%until.2, body=%turn.2, backend_config={"a":1}
  ROOT %both.1 = (s32[]{:T(128)}, f32[8]{0}) tuple(%next.1, %inner.1)
}

%turn.2 (p.2: f32[8]) -> f32[8] {
  ROOT %deep.1 = f32[8]{0} add(%p.2, %p.2)
}

ENTRY %main.9 (a.1: f32[8]) -> f32[8] {
  %a.1 = f32[8]{0} parameter(0)
  %zero.1 = s32[]{:T(128)} constant(0)
  %copied.1 = s32[]{:T(128)} copy(%zero.1)
  %start.1 = (s32[]{:T(128)}, f32[8]{0}) tuple(%copied.1, %a.1)
  %outer.1 = (s32[]{:T(128)}, f32[8]{0}) while(%start.1), condition=%until.1, body=%turn.1, metadata={op_name="while"}
  %ids.1 = s32[4]{0} get-tuple-element(%outer.1), index=3
  ROOT %k.1 = f32[8]{0} custom-call(%ids.1, /*index=1*/%a.1), custom_call_target="tpu_custom_call", \
operand_layout_constraints={s32[4]{0}, f32[8]{0}}, backend_config={"custom_call_config":{"body":"TUz+/="}}
}
"""


def test_kernels():
    assert modules_kernels(TEXT) == [{"name": "k.1", "body": "TUz+/=", "sources": [("outer.1", 3), ("a.1", 0)]}]


def test_a_loop_from_0_to_5_by_2_has_3_trips():
    times, uncounted = modules_repeats(TEXT)
    assert (times["k.1"], times["x.1"], times["deep.1"]) == (1, 3, 3)
    assert uncounted == {"inner.1": ["deep.1"]}


@pytest.mark.parametrize(
    ("old", "new"),
    [("direction=LT", "direction=NE"), ("constant(2)", "parameter(1)"), ("copy(%zero.1)", "negate(%a.1)")],
)
def test_other_loops_are_not_counted(old, new):
    assert "outer.1" in modules_repeats(TEXT.replace(old, new))[1]
