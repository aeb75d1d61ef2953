"""`write_kv`, `copy_blocks`, `move_frames`, `fill_frames` against byte-exact references."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest

import cuda_kernels
from cuda_kernels import block_copy, cache_write, frames
from cuda_kernels.attention.spec import SPEC as ATTENTION
from cuda_kernels.block_copy.spec import SPEC as COPY
from cuda_kernels.cache_write.spec import SPEC as WRITE
from cuda_kernels.dtypes import STORAGE_DTYPES, nan_pattern
from cuda_kernels.frames.spec import GATHER, SCATTER
from cuda_kernels.frames.spec import SPEC as MOVE

assert cache_write and block_copy and frames  # the packages beside their functions


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Bit equality, NaN included."""
    return np.array_equal(left.view(np.uint8), right.view(np.uint8))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("kv_dtype", [None, "fp8_e4m3"])
@pytest.mark.parametrize("dtype", list(STORAGE_DTYPES))
def test_write_kv(seed: int, dtype: str, kv_dtype: str | None, layout: str) -> None:
    rng = np.random.default_rng(seed)
    for block_size in (1, 2, 16, 64):
        for tokens in (0, 1, 70):
            arguments = WRITE.make_inputs(
                rng,
                dtype=dtype,
                kv_dtype=kv_dtype,
                num_tokens=tokens,
                num_kv_heads=int(rng.integers(1, 5)),
                head_dim=int(rng.integers(1, 100)),
                value_dim=int(rng.integers(1, 100)),
                block_size=block_size,
                layout=layout,
            )
            expected = WRITE.reference(arguments)
            cuda_kernels.write_kv(**arguments)
            assert same_bits(arguments["arena"], expected)


def test_write_kv_takes_any_strides_and_int32_slots(seed: int) -> None:
    arguments = WRITE.make_inputs(
        np.random.default_rng(seed),
        dtype="float32",
        num_tokens=20,
        num_kv_heads=3,
        head_dim=8,
        value_dim=4,
        block_size=16,
    )
    expected = WRITE.reference(arguments)
    for name in ("key", "value"):
        tokens, heads, dims = arguments[name].shape
        wide = np.zeros((heads, tokens, 2 * dims), np.float32)
        wide[:, :, ::2] = arguments[name].transpose(1, 0, 2)
        arguments[name] = wide[:, :, ::2].transpose(1, 0, 2)
        arguments[name].flags.writeable = False
    arguments["slot_mapping"] = arguments["slot_mapping"].astype(np.int32)
    cuda_kernels.write_kv(**arguments)
    assert same_bits(arguments["arena"], expected)


@pytest.mark.parametrize("element", ["uint8", "uint16", "float32"])
def test_copy_blocks(seed: int, element: str) -> None:
    rng = np.random.default_rng(seed)
    for block_size in (1, 4, 64):
        arguments = COPY.make_inputs(
            rng,
            element=element,
            num_frames=20,
            num_layers=3,
            num_kv_heads=2,
            head_dim=7,
            value_dim=5,
            block_size=block_size,
            num_pairs=9,
        )
        expected = COPY.reference(arguments)
        cuda_kernels.copy_blocks(**arguments)
        assert same_bits(arguments["arena"], expected)


def copy_arguments(seed: int, pairs: list[tuple[int, int]]) -> dict[str, Any]:
    arguments = COPY.make_inputs(
        np.random.default_rng(seed),
        num_frames=8,
        num_layers=1,
        num_kv_heads=1,
        head_dim=4,
        value_dim=4,
        block_size=4,
        num_pairs=1,
    )
    source, target = np.array(pairs, np.int32).reshape(-1, 2).T
    return arguments | {
        "source": source,
        "target": target,
        "num_tokens": np.full(len(pairs), 4, np.int32),
    }


@pytest.mark.parametrize(
    ("pairs", "frame"),
    [([(1, 2), (2, 3)], 2), ([(1, 2), (4, 2)], 2), ([(1, 2), (3, 1)], 1), ([(1, 2), (2, 1)], 1)],
)
def test_copies_whose_order_would_matter_are_refused(
    seed: int, pairs: list[tuple[int, int]], frame: int
) -> None:
    """Case 3."""
    arguments = copy_arguments(seed, pairs)
    before = arguments["arena"].copy()
    with pytest.raises(ValueError, match=rf"frame {frame} "):
        cuda_kernels.copy_blocks(**arguments)
    assert same_bits(arguments["arena"], before)


def test_self_copy_does_nothing(seed: int) -> None:
    """Case 3: (5, 5) is a no-op, also beside a true copy of the same frame."""
    arguments = copy_arguments(seed, [(5, 5), (5, 6), (5, 5)])
    expected = arguments["arena"].copy()
    kept = COPY.reference(
        arguments
        | {"source": np.array([5]), "target": np.array([6])}
        | {"num_tokens": np.array([4])}
    )
    cuda_kernels.copy_blocks(**arguments)
    assert same_bits(arguments["arena"], kept)
    assert same_bits(arguments["arena"][:6], expected[:6])


def placed(shape: tuple[int, int], offset: int) -> tuple[np.ndarray, np.ndarray]:
    """An arena of NaN bits that begins ``offset`` bytes behind a multiple of 64, and the memory
    that it lies in, NaN bits too."""
    size = shape[0] * shape[1]
    memory = np.full(size + 256, 0xFF, np.uint8)
    start = -memory.ctypes.data % 64 + 64 + offset
    return memory[start : start + size].reshape(shape), memory


FRAME_BYTES = (1, 2, 6, 12, 63, 64, 65, 127, 128, 191, 640, 4096, 4097)


@pytest.mark.parametrize("target_offset", [0, 1, 33, 63])
def test_move_frames(seed: int, target_offset: int) -> None:
    """Any size at any address: the named frames change, nothing else in or around the arena."""
    rng = np.random.default_rng(seed)
    for frame_bytes in (*FRAME_BYTES, *rng.integers(1, 7000, 6).tolist()):
        for moves in (0, 1, 9):
            arguments = MOVE.make_inputs(
                rng, num_frames=12, frame_bytes=frame_bytes, num_moves=moves
            )
            target, memory = placed((12, frame_bytes), target_offset)
            source, _ = placed((12, frame_bytes), int(rng.integers(0, 64)))
            source[:] = arguments["source_arena"]
            arguments |= {"target_arena": target, "source_arena": source}
            expected = MOVE.reference(arguments)
            cuda_kernels.move_frames(**arguments)
            assert same_bits(target, expected), (frame_bytes, moves)
            target[:] = 0xFF
            assert (memory == 0xFF).all(), (frame_bytes, moves)


def test_move_frames_of_many_megabytes(seed: int) -> None:
    """More than the caches hold, no multiple of a line, source and target askew."""
    rng = np.random.default_rng(seed)
    frame_bytes = 5 * 2**20 + 37
    source, _ = placed((3, frame_bytes), 5)
    source[:] = rng.integers(0, 256, source.shape, np.uint8)
    target, _ = placed((3, frame_bytes), 60)
    cuda_kernels.move_frames(target, np.array([2, 0]), source, np.array([1, 2]))
    assert same_bits(target[[2, 0]], source[[1, 2]])
    assert (target[1] == 0xFF).all()


def test_fill_frames(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for dtype in STORAGE_DTYPES:
        arena = rng.integers(0, 256, (6, 24), np.uint8)
        before = arena.copy()
        cuda_kernels.fill_frames(arena, np.array([4, 1], np.int32), nan_pattern(dtype))
        words = arena.view(nan_pattern(dtype).dtype)
        assert (words[[1, 4]] == nan_pattern(dtype)).all()
        assert same_bits(arena[[0, 2, 3, 5]], before[[0, 2, 3, 5]])


@pytest.fixture
def huge_arena() -> Any:
    """A uint16 arena of more than 2**31 elements; pages are mapped when touched (case 71)."""
    frame_elements = 2 * 16 * 64 + 1024
    frames_needed = 2**31 // frame_elements + 3
    size = frames_needed * frame_elements * 2
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, np.uint16).reshape(frames_needed, frame_elements)


def test_both_ends_of_an_arena_of_more_than_2_to_31_elements(seed: int, huge_arena: Any) -> None:
    """Case 71: one table names frames at both ends; all index arithmetic is int64."""
    rng = np.random.default_rng(seed)
    last = huge_arena.shape[0] - 1
    small = ATTENTION.make_inputs(
        rng,
        dtype="float16",
        seq_lens=[60],
        query_lens=[5],
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        value_dim=64,
        block_size=16,
    )
    table = np.array([last, 0, last - 1, 1], np.int32)
    slots = (table[:, None].astype(np.int64) * 16 + np.arange(16)).ravel()
    assert last * huge_arena.shape[1] > 2**31
    dense = {}
    for name in ("key", "value"):
        start = small[f"{name}_offset"]
        rows = small["arena"][small["table"], start : start + 16 * 64].reshape(64, 1, 64)
        dense[name] = np.ascontiguousarray(rows)
    geometry = {
        "dtype": "float16",
        "key_offset": 3,
        "value_offset": 3 + 16 * 64,
        "block_size": 16,
        "num_kv_heads": 1,
        "head_dim": 64,
        "value_dim": 64,
    }
    cuda_kernels.write_kv(huge_arena, dense["key"], dense["value"], slot_mapping=slots, **geometry)
    expected, _ = ATTENTION.reference(small)
    out = np.zeros_like(small["out"])
    rows = {name: small[name] for name in ("table_start", "seq_lens", "query_start")}
    cuda_kernels.paged_attention(out, small["query"], huge_arena, table=table, **rows, **geometry)
    assert np.abs(out.view(np.float16) - expected).max() <= 8e-3
    planes = {
        "plane_offset": np.array([3]),
        "plane_rows": np.array([1]),
        "plane_width": np.array([64]),
    }
    cuda_kernels.copy_blocks(
        huge_arena, np.array([last]), np.array([2]), np.array([16]), block_size=16, **planes
    )
    assert same_bits(huge_arena[2, 3 : 3 + 1024], huge_arena[last, 3 : 3 + 1024])
    other = np.zeros((2, huge_arena.shape[1] * 2), np.uint8)
    cuda_kernels.move_frames(other, np.array([1]), huge_arena.view(np.uint8), np.array([last]))
    assert same_bits(other[1], huge_arena[last])


# -- pieces of frames ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_pieces_to_staging_and_back(seed: int, dtype: type) -> None:
    rng = np.random.default_rng(seed)
    for count in (0, 1, 5):
        for frame_bytes in (1, 64, 1000):
            arguments = GATHER.make_inputs(
                rng, num_frames=7, frame_bytes=frame_bytes, num_pieces=count
            )
            arguments["ids"] = arguments["ids"].astype(dtype)
            expected = GATHER.reference(arguments)
            cuda_kernels.gather_frames(**arguments)
            assert same_bits(arguments["staging"], expected)
            arguments["staging"] ^= 0x5A
            expected = SCATTER.reference(arguments)
            cuda_kernels.scatter_frames(**arguments)
            assert same_bits(arguments["arena"], expected)


def test_pieces_that_are_refused() -> None:
    arena, staging = np.zeros((4, 64), np.uint8), np.ones((2, 32), np.uint8)
    for ids, options, words in (
        ([1, 1], {}, "more than once"),
        ([1, 4], {}, r"ids\[1\] is frame 4"),
        ([1], {}, "ids must have shape"),
        ([1, 2], {"offset": 33}, "offset 33"),
        ([1, 2], {"offset": -1}, "offset"),
    ):
        with pytest.raises(ValueError, match=words):
            cuda_kernels.scatter_frames(arena, np.array(ids, np.int32), staging, **options)
    assert not arena.any()
    with pytest.raises(ValueError, match="overlap"):
        cuda_kernels.gather_frames(arena[:2], arena, np.array([2, 3], np.int32))
