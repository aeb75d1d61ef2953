"""Bad arguments: type, words of the message, nothing written (bad_input.md; cases 69, 73)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cuda_kernels
from cuda_kernels.attention.spec import SPEC as ATTENTION
from cuda_kernels.block_copy.spec import SPEC as COPY
from cuda_kernels.cache_write.spec import SPEC as WRITE
from cuda_kernels.frames.spec import SPEC as MOVE

Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]


def attention_arguments() -> Arguments:
    return ATTENTION.make_inputs(
        np.random.default_rng(1),
        dtype="float32",
        seq_lens=[40, 9],
        query_lens=[3, 1],
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        value_dim=8,
        block_size=16,
    )


def write_arguments() -> Arguments:
    return WRITE.make_inputs(
        np.random.default_rng(1),
        dtype="float32",
        num_tokens=6,
        num_kv_heads=2,
        head_dim=16,
        value_dim=8,
        block_size=16,
    )


def copy_arguments() -> Arguments:
    return COPY.make_inputs(
        np.random.default_rng(1),
        num_frames=9,
        num_layers=1,
        num_kv_heads=2,
        head_dim=4,
        value_dim=4,
        block_size=16,
        num_pairs=3,
    )


def move_arguments() -> Arguments:
    return MOVE.make_inputs(np.random.default_rng(1), num_frames=5, frame_bytes=32, num_moves=3)


def fill_arguments() -> Arguments:
    return {
        "arena": np.zeros((4, 32), np.uint8),
        "ids": np.array([1, 2]),
        "pattern": np.uint32(7),
    }


def put(name: str, index: Any, value: Any) -> Change:
    """A change of one element of an array argument."""

    def change(arguments: Arguments) -> Arguments:
        array = arguments[name].copy()
        array[index] = value
        return {name: array}

    return change


def cast(name: str, dtype: Any) -> Change:
    return lambda arguments: {name: np.zeros(arguments[name].shape, dtype)}


def to(**values: Any) -> Change:
    return lambda _: values


def cut(name: str, index: Any) -> Change:
    return lambda arguments: {name: arguments[name][index]}


NAN = float("nan")
ATTENTION_ROWS: list[tuple[Change, type[Exception], str]] = [
    (put("table", 1, -1), ValueError, r"row 0, column 1, names frame -1; .* 0 to 6"),
    (put("table", 3, 7), ValueError, r"row 1, column 0, names frame 7; .* 0 to 6"),
    (put("table", 2, 2**31 - 1), ValueError, r"row 0, column 2, names frame 2147483647"),
    (put("seq_lens", 1, 17), ValueError, r"too short for row 1.*17 needs 2 columns of 16"),
    (put("seq_lens", 0, -1), ValueError, r"seq_lens\[0\] is -1"),
    (put("seq_lens", 0, 2), ValueError, r"row 0 has 3 query tokens, more than its seq_lens\[0\] 2"),
    (put("table_start", 0, -1), ValueError, r"table is too short for row 0"),
    (put("table_start", 1, 2**40), ValueError, r"table is too short for row 1"),
    (put("query_start", 0, 1), ValueError, r"query_start must begin at 0"),
    (put("query_start", 2, 5), ValueError, r"query_start must .* num_tokens 4; got 0 and 5"),
    (put("query_start", 1, 9), ValueError, r"query tokens|falls"),
    (put("query_start", 1, -1), ValueError, r"falls from row 0"),
    (cut("query_start", slice(2)), ValueError, r"query_start must have shape \[3\], got \[2\]"),
    (cut("table_start", slice(1)), ValueError, r"table_start must have shape \[2\]"),
    (cast("table", np.int16), TypeError, r"table must have dtype int32, got int16"),
    (cast("table", np.float32), TypeError, r"table must have dtype int32, got float32"),
    (cut("table", slice(None, None, 2)), ValueError, r"table must be C-contiguous"),
    (to(table=[0, 1, 2, 3]), TypeError, r"table must be a numpy array, got list"),
    (cast("seq_lens", np.float64), TypeError, r"seq_lens must have dtype int32 or int64"),
    (cast("query", np.float64), TypeError, r"query must have dtype float32, got float64"),
    (cast("arena", np.uint16), TypeError, r"arena must have dtype float32, got uint16"),
    (to(query=None), TypeError, r"query must be a numpy array, got NoneType"),
    (cut("query", np.s_[:, :, :8]), ValueError, r"query must have shape \[any, any, 16\]"),
    (cut("query", np.s_[:, :3]), ValueError, r"3 heads, .* multiple of num_kv_heads 2"),
    (cut("query", np.s_[:, :0]), ValueError, r"0 heads"),
    (cut("out", np.s_[:3]), ValueError, r"out must have shape \[4, 4, 8\], got \[3, 4, 8\]"),
    (cut("arena", np.s_[:, ::2]), ValueError, r"arena must be C-contiguous"),
    (cut("arena", np.s_[0]), ValueError, r"arena must have shape \[any, any\]"),
    (cast("lse", np.float64), TypeError, r"lse must have dtype float32"),
    (cut("lse", np.s_[:, :1]), ValueError, r"lse must have shape"),
    (to(dtype="float8_e4m3"), ValueError, r"cpu kernels; supported: float32, bfloat16, float16"),
    (to(dtype="bloat16"), ValueError, r"did you mean 'bfloat16'"),
    (to(dtype=np.float32), TypeError, r"dtype must be a string"),
    (to(key_offset=10**6), ValueError, r"key_offset 1000000 .* past the frame's end"),
    (to(value_offset=-1), ValueError, r"value_offset must be an integer from 0"),
    (to(block_size=0), ValueError, r"block_size must be an integer from 1"),
    (to(block_size=16.0), TypeError, r"block_size must be an integer, got float"),
    (to(num_kv_heads=True), TypeError, r"num_kv_heads must be an integer, got a bool"),
    (to(head_dim=0), ValueError, r"head_dim must be an integer from 1"),
    (to(value_dim=-3), ValueError, r"value_dim must be an integer from 1"),
    (to(layout="HDN"), ValueError, r"layout must be 'HND' or 'NHD', got 'HDN'"),
    (to(layout=1), TypeError, r"layout must be a string, 'HND' or 'NHD'; got int"),
    (to(window=0), ValueError, r"window must be an integer from 1"),
    (to(window=-4), ValueError, r"window .* got -4"),
    (to(window=2.5), TypeError, r"window must be an integer, got float"),
    (to(softcap=-1.0), ValueError, r"softcap must be a finite number greater than 0, got -1"),
    (to(softcap=0), ValueError, r"softcap must be"),
    (to(softcap=NAN), ValueError, r"softcap must be .* got nan"),
    (to(scale=0.0), ValueError, r"scale must be a finite number other than 0"),
    (to(scale=NAN), ValueError, r"scale must be"),
    (to(scale=float("inf")), ValueError, r"scale must be .* got inf"),
    (to(scale=1e300), ValueError, r"scale must be"),
    (to(scale="1"), TypeError, r"scale must be a number or None, got str"),
    (to(scale=True), TypeError, r"scale must be a number"),
    (to(alibi=np.ones(3, np.float32)), ValueError, r"alibi must have shape \[4\], got \[3\]"),
    (to(alibi=np.ones(4)), TypeError, r"alibi must have dtype float32"),
    (to(alibi=[1, 1, 1, 1]), TypeError, r"alibi must be a numpy array"),
    (to(alibi=np.array([0, NAN, 0, 0], np.float32)), ValueError, r"alibi\[1\] is not a finite"),
    (to(sinks=np.array([0, 0, NAN, 0], np.float32)), ValueError, r"sinks\[2\] is not"),
    (to(sinks=np.array([0, 0, np.inf, 0], np.float32)), ValueError, r"sinks\[2\] is not"),
]
WRITE_ROWS: list[tuple[Change, type[Exception], str]] = [
    (put("slot_mapping", 5, 48), ValueError, r"slot_mapping\[5\] is 48; .* 0 to 47 \(3 frames"),
    (put("slot_mapping", 0, -2), ValueError, r"slot_mapping\[0\] is -2"),
    (put("slot_mapping", 0, 2**62), ValueError, r"slot_mapping\[0\]"),
    (cast("slot_mapping", np.float32), TypeError, r"slot_mapping must have dtype int32 or int64"),
    (cut("slot_mapping", slice(3)), ValueError, r"key must have shape \[3, 2, 16\], got \[6"),
    (cut("key", np.s_[:, :1]), ValueError, r"key must have shape \[6, 2, 16\], got \[6, 1, 16\]"),
    (cast("key", np.float16), TypeError, r"key must have dtype float32, got float16"),
    (cut("value", np.s_[:, :, :7]), ValueError, r"value must have shape \[6, 2, 8\]"),
    (to(value=None), TypeError, r"value must be a numpy array"),
    (to(value_offset=1000), ValueError, r"value_offset 1000 puts a plane of 2 x 16 x 8"),
    (to(block_size=-16), ValueError, r"block_size"),
    (to(layout="hnd"), ValueError, r"layout must be 'HND' or 'NHD', got 'hnd'"),
    (to(dtype="int8"), ValueError, r"'int8' is not supported"),
]
COPY_ROWS: list[tuple[Change, type[Exception], str]] = [
    (put("source", 1, 9), ValueError, r"source\[1\] is frame 9, but arena has frames 0 to 8"),
    (put("target", 0, -1), ValueError, r"target\[0\] is frame -1"),
    (put("num_tokens", 2, 17), ValueError, r"num_tokens\[2\] is 17; allowed: 0 to 16"),
    (put("num_tokens", 2, -1), ValueError, r"num_tokens\[2\] is -1"),
    (cut("target", slice(2)), ValueError, r"target must have shape \[3\], got \[2\]"),
    (cast("source", np.int16), TypeError, r"source must have dtype int32 or int64"),
    (put("plane_offset", 1, 10**9), ValueError, r"plane_offset\[1\] 1000000000 .* past"),
    (put("plane_offset", 0, -8), ValueError, r"plane_offset\[0\] must be"),
    (put("plane_width", 0, 10**6), ValueError, r"plane_offset\[0\] .* past the frame's end"),
    (to(arena=[[1]]), TypeError, r"arena must be a numpy array"),
]
MOVE_ROWS: list[tuple[Change, type[Exception], str]] = [
    (put("source_ids", 0, 5), ValueError, r"source_ids\[0\] is frame 5, but source_arena has"),
    (put("target_ids", 2, -1), ValueError, r"target_ids\[2\] is frame -1, but target_arena has"),
    (to(target_ids=np.array([2, 1, 2])), ValueError, r"names frame 2 more than once"),
    (cut("target_ids", slice(1)), ValueError, r"target_ids must have shape \[3\]"),
    (cut("source_arena", np.s_[:, :16]), ValueError, r"source_arena must be C-contiguous"),
    (to(source_arena=np.zeros((5, 16), np.uint8)), ValueError, r"target_arena must have shape"),
    (cast("source_arena", np.uint16), TypeError, r"source_arena must have dtype uint8"),
    (lambda a: {"source_arena": a["target_arena"]}, ValueError, r"overlap; use copy_blocks"),
]
FILL_ROWS: list[tuple[Change, type[Exception], str]] = [
    (to(ids=np.array([4])), ValueError, r"ids\[0\] is frame 4"),
    (to(pattern=7), TypeError, r"pattern must be a numpy scalar"),
    (to(pattern=np.float64(0)), TypeError, r"pattern must be"),
    (to(arena=np.zeros((5, 6), np.uint8)), ValueError, r"does not divide a frame of 6 bytes"),
    (to(arena=np.zeros(5, np.uint8)), ValueError, r"arena must have shape"),
]
ALL = [
    (function, make, *row)
    for function, make, rows in (
        ("paged_attention", attention_arguments, ATTENTION_ROWS),
        ("write_kv", write_arguments, WRITE_ROWS),
        ("copy_blocks", copy_arguments, COPY_ROWS),
        ("move_frames", move_arguments, MOVE_ROWS),
        ("fill_frames", fill_arguments, FILL_ROWS),
    )
    for row in rows
]


def contents(arguments: Arguments) -> list[bytes]:
    return [value.tobytes() for value in arguments.values() if isinstance(value, np.ndarray)]


@pytest.mark.parametrize(("function", "make", "change", "error", "words"), ALL)
def test_bad_argument(
    function: str, make: Callable[[], Arguments], change: Change, error: type[Exception], words: str
) -> None:
    arguments = make()
    changed = arguments | change(arguments)
    before = contents(changed)
    with pytest.raises(error, match=words) as caught:
        getattr(cuda_kernels, function)(**changed)
    assert type(caught.value) is error
    assert len(str(caught.value)) <= 300
    assert contents(changed) == before
    getattr(cuda_kernels, function)(**arguments)  # and good work goes on


@pytest.mark.parametrize(
    ("function", "make", "written"),
    [
        ("paged_attention", attention_arguments, "out"),
        ("paged_attention", attention_arguments, "lse"),
        ("write_kv", write_arguments, "arena"),
        ("copy_blocks", copy_arguments, "arena"),
        ("move_frames", move_arguments, "target_arena"),
        ("fill_frames", fill_arguments, "arena"),
    ],
)
def test_read_only_targets_are_refused(
    function: str, make: Callable[[], Arguments], written: str
) -> None:
    arguments = make()
    arguments[written].flags.writeable = False
    with pytest.raises(ValueError, match=f"{written} is read-only"):
        getattr(cuda_kernels, function)(**arguments)


def test_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="tree_mask"):
        cuda_kernels.paged_attention(**attention_arguments(), tree_mask=None)
