"""Optimised HLO text as records: expected values are read off the texts by hand."""

import gc
import random
import subprocess
import sys
import time
from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precaudit.errors import UserError
from precaudit.interpreters.tpu.grammar import parse_module
from precaudit.interpreters.tpu.hlo import ArrayType
from precaudit.interpreters.tpu.opcodes import OPCODES, is_known
from precaudit.interpreters.tpu.scanner import HloError
from tests.helpers.tpus import needs_libtpu, text_for

# What libtpu 0.0.42.1 gave of a loop over a product, shortened; parents of frames are one more than they are.
TEXT = r"""HloModule jit_f, is_scheduled=true, input_output_alias={ {1}: (0, {}, may-alias) }, entry_computation_layout={(f32[8,128]{1,0:T(8,128)}, /*index=5*/bf16[128]{0})->f32[8]{0}}

FileNames
1 "/home/u/model.py"
2 "/venv/lib/python3.11/site-packages/jax/_src/nn/functions.py"

FunctionNames
1 "layer"
2 "softmax"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=9}
2 {file_name_id=2 function_name_id=2 line=700 end_line=700 column=1 end_column=2}
3 {file_name_id=1 function_name_id=1 line=40 end_line=41 column=1 end_column=2}

StackFrames
1 {file_location_id=3 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}
3 {file_location_id=2 parent_frame_id=3}


%region_1.7 (a.1: f32[], b.1: f32[]) -> f32[] {
  %a.1 = f32[]{:T(128)} parameter(0)
  %b.1 = f32[] parameter(1)
  ROOT %add.3 = f32[]{:T(128)} add(%a.1, %b.1)
}

%body (s.1: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %s.1 = (s32[]{:T(128)}, f32[8,128]{0,1:T(8,128)(2,1)S(1)}) parameter(0)
  %constant.1 = s32[1,2,2]{2,1,0:T(1,128)} constant({ /*i0=0*/ { { 1, -2 }, {3, 4} } })
  %get-tuple-element.1 = f32[8,128]{0,1:T(8,128)} get-tuple-element(%s.1), index=1, control-predecessors={%constant.1}
  ROOT %t = (s32[], /*index=1*/f32[8,128]) tuple(%constant.1, %get-tuple-element.1)
}, execution_thread="main"

%condition (s.2: (s32[], f32[8,128])) -> pred[] {
  %s.2 = (s32[], f32[8,128]) parameter(0)
  ROOT %less = pred[] constant(false)
}

ENTRY %main.9 (x.1: f32[8,128], w.1: bf16[128]) -> f32[8] {
  %x.1 = f32[8,128]{1,0:T(8,128)} parameter(0), sharding={replicated}, metadata={op_name="params[\'layers\'][\'}up\']"}
  %w.1 = bf16[128] parameter(1)
  %zero = f32[] constant(-0.5)
  %token = token[] after-all()
  %while.1 = (s32[], f32[8,128]) while((s32[], f32[8,128]) %x.1), condition=%condition, body=%body, metadata={op_name="jit(f)/while" stack_frame_id=2}
  %custom-call.1 = () custom-call(%w.1), custom_call_target="Assume\"d", backend_config={"a":["}",{"b":"c, d=%x"}], "e": 1}
  %slice-start = (f32[8,128], f32[2,128], s32[]) slice-start(%x.1), slice={[0:2], [0:128:1]}
  %convolution.1 = f32[8,8]{1,0} convolution(f32[8,128] %x.1, x.1), window={size=4x2 pad=3_3x0_-1 rhs_reversal=1x0}, dim_labels=0b1f_o0i1->0bf1, operand_precision={high,default}
  ROOT %reduce.2 = f32[8]{0:T(128)} reduce(%x.1, %zero), dimensions={1}, to_apply=%region_1.7, metadata={op_name="jit(f)/reduce_sum" stack_frame_id=3}
}
"""  # noqa: E501
MODULE = parse_module(TEXT)
MAIN = MODULE.computations["main.9"].instructions


def test_computations_in_their_order_and_the_entry():
    assert list(MODULE.computations) == ["region_1.7", "body", "condition", "main.9"]
    assert MODULE.entry == "main.9"
    assert MODULE.attributes["is_scheduled"] == "true"
    assert MODULE.attributes["input_output_alias"] == "{ {1}: (0, {}, may-alias) }"
    assert MODULE.computations["body"].root.name == "t"
    assert [x.name for x in MODULE.computations["region_1.7"].parameters] == ["a.1", "b.1"]


def test_types():
    assert MAIN["x.1"].type == ArrayType("f32", (8, 128), (1, 0), (8, 128))
    assert MAIN["w.1"].type == ArrayType("bf16", (128,), (0,))  # no layout written: rows run slowest
    assert MAIN["zero"].type == ArrayType("f32", (), ())
    assert MAIN["token"].type == ArrayType("token", (), ())
    assert MAIN["custom-call.1"].type == ()
    body = MODULE.computations["body"].instructions
    assert body["s.1"].type == (ArrayType("s32", (), ()), ArrayType("f32", (8, 128), (0, 1), (8, 128)))
    assert body["t"].type == (ArrayType("s32", (), ()), ArrayType("f32", (8, 128), (1, 0)))


def test_literals_and_operands():
    assert MODULE.computations["body"].instructions["constant.1"].literal == "{  { { 1, -2 }, {3, 4} } }"
    assert MAIN["zero"].literal == "-0.5"
    assert MAIN["x.1"].literal == "0"
    assert MAIN["reduce.2"].operands == ("x.1", "zero")
    assert MAIN["convolution.1"].operands == ("x.1", "x.1")
    assert MAIN["while.1"].operands == ("x.1",)  # its type stands before it
    assert MAIN["token"].operands == MAIN["zero"].operands == ()


def test_attributes():
    product = MAIN["convolution.1"]
    assert product.fields("window") == {"size": "4x2", "pad": "3_3x0_-1", "rhs_reversal": "1x0"}
    assert product.attributes["dim_labels"] == "0b1f_o0i1->0bf1"
    assert product.attributes["operand_precision"] == "{high,default}"
    assert MAIN["slice-start"].ints("slice") == (0, 2, 0, 128, 1)
    assert MAIN["reduce.2"].ints("dimensions") == (1,)
    assert MAIN["reduce.2"].ints("none") == ()
    call = MAIN["custom-call.1"]
    assert call.attributes["custom_call_target"] == 'Assume"d'
    assert call.attributes["backend_config"] == '{"a":["}",{"b":"c, d=%x"}], "e": 1}'
    assert MAIN["while.1"].computations == ("body", "condition")
    assert MAIN["reduce.2"].computations == ("region_1.7",)
    assert MAIN["x.1"].computations == ()


def test_names_lines_and_roots():
    assert MAIN["x.1"].op_name == "params['layers']['}up']"
    assert MAIN["reduce.2"].op_name == "jit(f)/reduce_sum"
    assert MAIN["w.1"].op_name == ""
    lines = TEXT.split("\n")
    for _, instruction in MODULE.walk():
        assert f"%{instruction.name} = " in lines[instruction.line - 1]
        assert instruction.root == ("ROOT" in lines[instruction.line - 1])
    assert len(list(MODULE.walk())) == TEXT.count(" = ")


def test_sources_leave_out_jax_itself():
    assert MAIN["reduce.2"].frame == 3
    jax = "/venv/lib/python3.11/site-packages/jax/_src/nn/functions.py:700"
    assert MODULE.frames(MAIN["reduce.2"]) == (jax, "/home/u/model.py:12", "/home/u/model.py:40")
    assert MODULE.source(MAIN["reduce.2"]) == "/home/u/model.py:12"
    assert MODULE.source(MAIN["w.1"]) is None
    assert MODULE.frames(MAIN["w.1"]) == ()
    alone = parse_module(TEXT.replace("/home/u/model.py", "/src/jax/jax/_src/x.py"))
    assert alone.source(alone.computations["main.9"].root) is None
    own = parse_module(TEXT.replace("/home/u/model.py", "/home/u/jax/train.py"))  # a folder that is only called so
    assert own.source(own.computations["main.9"].root) == "/home/u/jax/train.py:12"


def test_parents_are_read_as_written_where_some_frame_has_none():
    plain = TEXT.replace("parent_frame_id=1}", "parent_frame_id=0}").replace("parent_frame_id=2}", "parent_frame_id=1}")
    plain = plain.replace("parent_frame_id=3}", "parent_frame_id=2}")
    left_out = plain.replace(" parent_frame_id=0}", "}")
    for text in (plain, left_out):
        module = parse_module(text)
        assert module.frames(module.computations["main.9"].root) == MODULE.frames(MAIN["reduce.2"])


def test_frames_that_go_round_end():
    text = TEXT.replace("parent_frame_id=1}", "parent_frame_id=4}")
    module = parse_module(text)
    assert len(module.frames(module.computations["main.9"].root)) == 3


@pytest.mark.parametrize(
    ("old", "new", "after", "message"),
    [
        ("HloModule", "Module", 0, "'HloModule' should stand where"),
        ("add(%a.1, %b.1)", "adds(%a.1, %b.1)", 0, "the opcode 'adds' is not known"),
        ("add(%a.1, %b.1)", "add(%a.1, %c.1)", 0, "add.3 reads c.1, which nothing before it makes"),
        ("add(%a.1, %b.1)", "add(%a.1, %b.1", 1, "')' should stand where"),
        ("%b.1 = f32[] p", "%a.1 = f32[] p", 0, "a second instruction a.1"),
        ("%b.1 = f32[] parameter(1)", "%b.1 = f32[] parameter(2)", 2, "computation region_1.7 has not every"),
        ("  ROOT %add.3", "  %add.3", 1, "computation region_1.7 has not one ROOT"),
        ("to_apply=%region_1.7", "to_apply=%region", 0, "reduce.2 calls region, which nothing before it defines"),
        ("bf16[128] parameter", "bf16[128]{1} parameter", 0, "a layout that is not of the type's dimensions"),
        ("bf16[128] parameter", "bf16[<=128] parameter", 0, "an integer should stand where '<=128]"),
        ("{ { 1, -2 }, {3, 4} } })", "{ { 1, -2 }, {3, 4} } )", 0, "'}' should stand where"),
        ('"Assume\\"d"', '"Assume', 0, ""),
        ("dimensions={1}", "dimensions={1]", 0, "'}' should stand where ']"),
        ("ENTRY %main.9", "%main.9", 11, "the text ends without an ENTRY"),
        ("%condition (", "ENTRY %condition (", 5, "a second ENTRY computation"),
        ("%condition (", "%body (", 0, "a second computation body"),
    ],
)
def test_a_broken_text_names_its_line(old, new, after, message):
    """The line of the change, or how many lines after it the text stops making sense."""
    line = TEXT[: TEXT.index(old)].count("\n") + 1 + after
    with pytest.raises(UserError) as raised:
        parse_module(TEXT.replace(old, new, 1))
    assert isinstance(raised.value, HloError)
    assert str(raised.value).startswith(f"line {line}: {message}")


def test_opcodes_run_asynchronously_are_known():
    assert is_known("slice-start")
    assert is_known("fusion-done")
    assert not is_known("start")
    assert not is_known("slices-start")
    assert all(is_known(opcode) for opcode in OPCODES)


@pytest.mark.parametrize("text", ["", " ", "HloModule", "HloModule m\n", "(" * 100_000, "HloModule m, a=" + "{" * 9999])
def test_texts_that_are_none(text):
    with pytest.raises(HloError):
        parse_module(text)


def test_types_inside_each_other_end():
    text = TEXT.replace("bf16[128] parameter", "(" * 10_000 + "bf16[128] parameter")
    with pytest.raises(HloError, match="line 42: a type of too many"):
        parse_module(text)


def test_numbers_of_any_length():
    with pytest.raises(HloError, match="line 42: an integer should stand"):
        parse_module(TEXT.replace("bf16[128] parameter(1)", f"bf16[128] parameter({'1' * 6000})"))


def test_time_is_linear_in_the_text():
    """4 MB, with as many long attributes as a real program has, in less than 2 s on a busy machine."""
    line = next(x for x in TEXT.split("\n") if "custom-call.1" in x).replace('"e": 1', f'"e": [{"1, " * 300}1]')
    head, tail = TEXT.split("  ROOT %reduce.2")
    many = "".join(line.replace("custom-call.1", f"c{i}") + "\n" for i in range(4000))
    text = f"{head}{many}  ROOT %reduce.2{tail}"
    assert len(text) > 3.5e6
    gc.collect()
    started = time.process_time()
    assert len(list(parse_module(text).walk())) == len(list(MODULE.walk())) + 4000
    assert time.process_time() - started < 2


@given(st.integers(0, len(TEXT)))
@settings(max_examples=150)
def test_a_text_cut_anywhere_is_an_error_or_a_module(at):
    _read(TEXT[:at])


@given(st.data())
@settings(max_examples=300)
def test_a_text_changed_anywhere_is_an_error_or_a_module(data):
    _read(_changed(TEXT, data.draw(st.integers(0, 2**32))))


def _changed(text, seed):
    source = random.Random(seed)
    for _ in range(source.randint(1, 4)):
        at, length = source.randrange(len(text)), source.choice((0, 1, 1, 5, 40))
        other = source.randrange(len(text))
        new = source.choice(
            ("", source.choice('(){}[]",=%/*\\\n\0 9é₂'), text[other : other + source.choice((1, 8, 60))])
        )
        text = text[:at] + new + text[at + length :]
    return text


def _read(text):
    """Read a text, and of a module everything that is read later."""
    try:
        module = parse_module(text)
    except HloError:
        return
    assert module.entry in module.computations
    for computation, instruction in module.walk():
        assert computation.root.root
        assert set(instruction.operands) <= set(computation.instructions)
        assert isinstance(instruction.op_name, str)
        assert instruction.ints("dimensions") is not None
        assert isinstance(module.frames(instruction), tuple)
        assert module.source(instruction) is None or ":" in module.source(instruction)


def _scanned(x, weights):
    def step(c, w):
        y = jax.nn.softmax(c @ w)
        return y, y[0]

    return jax.lax.scan(step, x, weights)


@cache
def _real():
    return text_for(_scanned, np.zeros((16, 128), np.float32), np.zeros((4, 128, 128), np.float32))


@needs_libtpu
def test_a_real_program_says_where_its_values_come_from():
    module = parse_module(_real())
    assert {x.opcode for _, x in module.walk()} >= {"while", "fusion", "convolution", "reduce", "parameter"}
    (product,) = [x for _, x in module.walk() if x.opcode == "convolution"]
    line = _scanned.__code__.co_firstlineno
    assert module.source(product) == f"{__file__}:{line + 2}"
    assert product.op_name.endswith("while/body/closed_call/dot_general")
    assert f"{__file__}:{line + 5}" in module.frames(product)[1:]
    (exponential, *_) = [x for _, x in module.walk() if x.opcode == "exponential"]
    assert module.source(exponential) == f"{__file__}:{line + 2}"
    main = module.computations[module.entry]
    assert [x.type for x in main.parameters] == [
        ArrayType("f32", (16, 128), (1, 0), (8, 128)),
        ArrayType("f32", (4, 128, 128), (2, 1, 0), (8, 128)),
    ]


@needs_libtpu
@given(st.integers(0, 2**32), st.integers(0, 2**20))
@settings(max_examples=100)
def test_a_real_text_changed_or_cut_is_an_error_or_a_module(seed, at):
    text = _real()
    _read(_changed(text, seed))
    _read(text[: at % len(text)])


def test_reading_needs_no_jax():
    code = "import sys; sys.modules['jax'] = None; import precaudit.interpreters.tpu.grammar"
    subprocess.run([sys.executable, "-c", code], check=True)
