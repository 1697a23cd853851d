"""Reading the text of a compiled module."""

import numpy as np
import pytest

from trencadis.inspect.worker import modules_integers, modules_kernels, modules_repeats, whole_lines

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


def test_a_kernel_whose_metadata_has_lines():
    metadata = 'frontend_attributes={kernel_metadata={\n"tile":512,\n"acc":"float32"\n}}, metadata={op_name="k"}, '
    text = TEXT.replace("backend_config", metadata + "backend_config")
    text = text.replace("  %ids.1", "  %before.1 = f32[8]{0} add(%a.1, %a.1)\n  %ids.1")
    assert modules_kernels(text) == [] and modules_kernels(whole_lines(text)) == modules_kernels(TEXT)
    assert modules_repeats(whole_lines(text))[0] == modules_repeats(TEXT)[0] | {"before.1": 1}
    assert whole_lines(TEXT) == TEXT


def test_a_computation_that_goes_on_after_such_a_kernel():
    early = '%z.1 = f32[8]{0} custom-call(%p.2), frontend_attributes={kernel_metadata={\n"tile":8\n}}\n  ROOT %deep.1'
    text = TEXT.replace("ROOT %deep.1", early)
    assert modules_repeats(whole_lines(text))[0]["deep.1"] == 3


INTEGERS = """\
HloModule jit_call

%inner.1 (q.1: s32[2]) -> s32[2] {
  ROOT %q.1 = s32[2]{0} parameter(1)
}

ENTRY %main.9 (a.1: f32[8], s.1: s32[2], t.1: s32[2]) -> f32[8] {
  %s.1 = s32[2]{0:T(128)} parameter(1), sharding={replicated}
  %t.1 = s32[2]{0:T(128)} parameter(2)
  %a.1 = f32[8]{0} parameter(0)
  %one.1 = f32[]{:T(128)} constant(1)
  %zero.1 = s32[1]{0:T(128)} constant({0}), metadata={op_name="zero"}
  %both.1 = s32[2]{0} constant({3, -4})
  %many.1 = s32[512]{0} constant({...})
  %start.1 = (s32[2]{0:S(1)}, s32[2]{0}, u32[]{:S(2)}) copy-start(%s.1)
  %done.1 = s32[2]{0:S(1)} copy-done(%start.1)
  %flat.1 = s32[1,2]{1,0} bitcast(%done.1)
  %other.1 = s32[2]{0} add(%s.1, %both.1)
  ROOT %k.1 = f32[8]{0} custom-call(%flat.1, %a.1), custom_call_target="tpu_custom_call"
}
"""


def test_integers_that_are_there_from_the_start():
    found = modules_integers(INTEGERS, {0: np.arange(8), 1: np.array([5, 6])})
    same = {name: [5, 6] for name in ("s.1", "start.1", "done.1", "flat.1")}
    assert found == same | {"zero.1": [0], "both.1": [3, -4]}


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
