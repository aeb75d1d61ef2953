"""The moves as CUDA kernels: their real PTX, interpreted, against the byte-exact references."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import cuda_kernels
from cuda_kernels.block_copy.spec import SPEC as COPY
from cuda_kernels.cache_write.spec import SPEC as WRITE
from cuda_kernels.frames.spec import FILL, GATHER, SCATTER
from cuda_kernels.frames.spec import SPEC as MOVE
from tests.ptx.device import InterpretedDevice, needs_compiler
from tests.ptx.errors import OutOfBounds, PtxError, Race

pytestmark = needs_compiler

#: Generated shapes for each kernel; KVMEM_PTX_SHAPES multiplies them.
MORE = int(os.environ.get("KVMEM_PTX_SHAPES", "1"))
SHAPES = {(9, 0): 160 * MORE, (8, 0): 32 * MORE}
CAPABILITIES = pytest.mark.parametrize("capability", list(SHAPES), ids=["sm_90", "sm_80"])


@pytest.fixture
def device(capability: tuple[int, int]) -> InterpretedDevice:
    return InterpretedDevice(capability)


def integers(rng: np.random.Generator) -> type[np.int32] | type[np.int64]:
    return (np.int32, np.int64)[int(rng.integers(2))]


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return np.array_equal(left.view(np.uint8), right.view(np.uint8))


def cuts(rng: np.random.Generator, *edges: int) -> int:
    """A number at, just below or just above an edge, or anywhere below the highest."""
    if rng.random() < 0.6:
        return max(0, int(rng.choice(edges)) + int(rng.integers(-1, 2)))
    return int(rng.integers(0, max(edges) + 1))


# -- write_kv -------------------------------------------------------------------------------------


def on_device(
    device: InterpretedDevice, arguments: dict[str, Any], written: str, shift: int = 0
) -> dict[str, Any]:
    """The arrays of some arguments mapped on a device; `written` may be written."""
    return {
        name: device.array(value, writable=name == written, misaligned=shift)
        if isinstance(value, np.ndarray)
        else value
        for name, value in arguments.items()
    }


@CAPABILITIES
def test_write_kv(seed: int, device: InterpretedDevice, capability: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(SHAPES[capability]):
        device.clear()
        even = rng.random() < 0.5
        dims = [int(rng.choice([8, 16, 64, 128])) if even else 1 + cuts(rng, 4, 63) for _ in "kv"]
        arguments = WRITE.make_inputs(
            rng,
            dtype=str(rng.choice(list(WRITE.tolerance))),
            num_tokens=cuts(rng, 1, 16, 40),
            num_kv_heads=int(rng.integers(1, 5)),
            head_dim=dims[0],
            value_dim=dims[1],
            block_size=int(rng.choice([1, 2, 16, 64])),
            skipped=float(rng.choice([0, 0.2, 1])),
            layout=str(rng.choice(["HND", "NHD"])),
        )
        arguments["slot_mapping"] = arguments["slot_mapping"].astype(integers(rng))
        if even:  # rows of the arena at multiples of 16 bytes, as kvmem's own are
            arguments["key_offset"] = 0
            arguments["value_offset"] = arguments["value_offset"] // 16 * 16
            frames = arguments["arena"].shape[0]
            arguments["arena"] = np.tile(arguments["arena"][:, :1], (1, _elements(arguments)))
            assert arguments["arena"].shape[0] == frames
        for name in ("key", "value"):
            if rng.random() < 0.3:  # a slice of a projection's output
                tokens, heads, width = arguments[name].shape
                wide = np.zeros((tokens, heads + 2, width), arguments[name].dtype)
                wide[:, 1 : heads + 1] = arguments[name]
                arguments[name] = wide[:, 1 : heads + 1]
        expected = WRITE.reference(arguments)
        size = arguments["key"].itemsize
        shift = 0 if even else int(rng.integers(0, 8)) * size
        mapped = on_device(device, arguments, "arena", shift=0)
        if shift:
            device.clear()
            mapped = on_device(device, {**arguments, "slot_mapping": None}, "arena", shift)
            mapped["slot_mapping"] = device.array(arguments["slot_mapping"])
        cuda_kernels.write_kv(**mapped)
        assert same_bits(arguments["arena"], expected)


def _elements(a: dict[str, Any]) -> int:
    """Elements of a frame, a multiple of 16, with room for both planes behind their offsets."""
    key = a["num_kv_heads"] * a["block_size"] * a["head_dim"]
    value = a["num_kv_heads"] * a["block_size"] * a["value_dim"]
    a["value_offset"] = -(-key // 16) * 16
    return -(-(a["value_offset"] + value) // 16) * 16 + 16


@CAPABILITIES
def test_rows_are_stored_sixteen_bytes_at_once(device: InterpretedDevice) -> None:
    """A row of 128 values of 16 bits and 4 heads is 64 lines: one for each of 64 threads."""
    arena = np.zeros((3, 2 * 4 * 16 * 128), np.uint16)
    rows = np.arange(2 * 4 * 128, dtype=np.uint16).reshape(2, 4, 128)
    arguments = {
        "arena": arena, "key": rows, "value": rows + 7, "dtype": "bfloat16", "key_offset": 0,
        "value_offset": 4 * 16 * 128, "block_size": 16, "num_kv_heads": 4, "head_dim": 128,
        "value_dim": 128, "slot_mapping": np.array([17, 40]),
    }  # fmt: skip
    expected = WRITE.reference(arguments)
    cuda_kernels.write_kv(**on_device(device, arguments, "arena"))
    assert same_bits(arena, expected)
    (_, counts), (made, _) = device.launched[0], device.compiled(device.launched[0][0].source)
    assert b"st.global.v4.u32" in made.ptx
    # All threads in step: one store each, and no more instructions than a short straight line.
    assert counts.steps < 150


@CAPABILITIES
def test_a_slot_past_the_arena_is_found(device: InterpretedDevice) -> None:
    """The kernel trusts slots; that the interpreter tells a wrong one makes it a check."""
    arguments = WRITE.make_inputs(
        np.random.default_rng(0), dtype="float32", num_tokens=4, num_kv_heads=1, head_dim=8,
        value_dim=8, block_size=4, skipped=0,
    )  # fmt: skip
    arguments["slot_mapping"][2] = arguments["arena"].shape[0] * 4 + 1
    with pytest.raises(OutOfBounds):
        cuda_kernels.write_kv(**on_device(device, arguments, "arena"))


@CAPABILITIES
def test_a_slot_named_twice_is_a_race(device: InterpretedDevice) -> None:
    arguments = WRITE.make_inputs(
        np.random.default_rng(0), dtype="float32", num_tokens=4, num_kv_heads=1, head_dim=8,
        value_dim=8, block_size=4, skipped=0,
    )  # fmt: skip
    arguments["slot_mapping"][2] = arguments["slot_mapping"][3]
    with pytest.raises(Race):
        cuda_kernels.write_kv(**on_device(device, arguments, "arena"))


# -- copy_blocks ----------------------------------------------------------------------------------


@CAPABILITIES
def test_copy_blocks(seed: int, device: InterpretedDevice, capability: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(SHAPES[capability]):
        device.clear()
        even = rng.random() < 0.5
        pairs = int(rng.integers(0, 6))
        arguments = COPY.make_inputs(
            rng,
            element=str(rng.choice(["uint8", "uint16", "float32"])),
            num_frames=2 * pairs + 1,
            num_layers=int(rng.integers(1, 4)),
            num_kv_heads=int(rng.integers(1, 5)),
            head_dim=int(rng.choice([16, 64])) if even else 1 + cuts(rng, 3, 40),
            value_dim=int(rng.choice([16, 64])) if even else 1 + cuts(rng, 3, 40),
            block_size=int(rng.choice([1, 4, 16, 64])),
            num_pairs=pairs,
        )
        if even:
            align_planes(rng, arguments)
        arguments["num_tokens"] = np.array(
            [cuts(rng, 0, arguments["block_size"]) for _ in range(pairs)], np.int32
        ).clip(0, arguments["block_size"])
        if pairs and rng.random() < 0.3:
            arguments["source"][0] = arguments["target"][0]  # a pair (i, i) does nothing
        kinds = integers(rng), integers(rng)
        for name in ("source", "target", "num_tokens"):
            arguments[name] = arguments[name].astype(kinds[0])
        for name in ("plane_offset", "plane_rows", "plane_width"):
            arguments[name] = arguments[name].astype(kinds[1])
        expected = COPY.reference(arguments)
        cuda_kernels.copy_blocks(**on_device(device, arguments, "arena"))
        assert same_bits(arguments["arena"], expected)


def align_planes(rng: np.random.Generator, a: dict[str, Any]) -> None:
    """Planes at multiples of 16 bytes, gaps between them."""
    sizes = a["plane_rows"] * a["block_size"] * a["plane_width"]
    a["plane_offset"] = np.cumsum([16, *(-(-sizes // 16) * 16 + 16)])[:-1]
    elements = int(a["plane_offset"][-1] + sizes[-1] + 31) // 16 * 16
    item = a["arena"].itemsize
    bits = rng.integers(0, 256, (a["arena"].shape[0], elements * item), np.uint8)
    a["arena"] = bits.view(a["arena"].dtype)


@CAPABILITIES
def test_a_frame_that_is_source_and_target_is_found(device: InterpretedDevice) -> None:
    """The public function refuses it on the host; on a device the interpreter shows why."""
    arguments = COPY.make_inputs(
        np.random.default_rng(0), num_frames=4, num_layers=1, num_kv_heads=1, head_dim=4,
        value_dim=4, block_size=4, num_pairs=2,
    )  # fmt: skip
    arguments |= {
        "source": np.array([0, 1], np.int32), "target": np.array([1, 2], np.int32),
        "num_tokens": np.array([4, 4], np.int32),
    }  # fmt: skip
    with pytest.raises(Race):
        cuda_kernels.copy_blocks(**on_device(device, arguments, "arena"))


# -- frames ---------------------------------------------------------------------------------------


@CAPABILITIES
def test_move_frames(seed: int, device: InterpretedDevice, capability: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(SHAPES[capability]):
        device.clear()
        frame_bytes = cuts(rng, 1, 4, 64, 4096, 32768 + 16, 40000)
        if rng.random() < 0.5:
            frame_bytes = frame_bytes // 16 * 16
        arguments = MOVE.make_inputs(
            rng, num_frames=6, frame_bytes=frame_bytes, num_moves=int(rng.integers(0, 6))
        )
        for name in ("target_ids", "source_ids"):
            arguments[name] = arguments[name].astype(integers(rng))
        expected = MOVE.reference(arguments)
        limit = int(rng.integers(1, 5))
        cuda_kernels.move_frames(**on_device(device, arguments, "target_arena"), max_blocks=limit)
        assert same_bits(arguments["target_arena"], expected)
        assert all(launch.grid[0] <= limit for launch, _ in device.launched)


@CAPABILITIES
def test_fill_frames(seed: int, device: InterpretedDevice, capability: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(SHAPES[capability]):
        device.clear()
        element = str(rng.choice(["uint8", "uint16", "float32"]))
        unit = max(int(rng.choice([1, 2, 4, 16])), np.dtype(element).itemsize)
        arguments = FILL.make_inputs(
            rng,
            num_frames=6,
            frame_bytes=-(-cuts(rng, 1, 16, 64, 4096, 32768 + 16, 40000) // unit) * unit,
            num_ids=int(rng.integers(0, 6)),
            element=element,
        )
        arguments["ids"] = arguments["ids"].astype(integers(rng))
        expected = FILL.reference(arguments)
        limit, shift = int(rng.integers(1, 9)), int(rng.choice([0, 0, 1, 2, 4, 8, 15]))
        arena = device.array(arguments["arena"], writable=True)
        if shift:
            device.clear()
            arena = device.array(arguments["arena"], writable=True, misaligned=shift)
        ids = device.array(arguments["ids"])
        cuda_kernels.fill_frames(arena, ids, arguments["pattern"], max_blocks=limit)
        assert same_bits(arguments["arena"], expected)
        assert all(launch.grid[0] <= limit for launch, _ in device.launched)


@CAPABILITIES
def test_frames_are_filled_sixteen_bytes_at_once(device: InterpretedDevice) -> None:
    """32 KiB are 2,048 lines, eight a thread; not one store more."""
    arena = np.zeros((2, 32768), np.uint8)
    cuda_kernels.fill_frames(
        device.array(arena, writable=True), device.array(np.array([1])), np.uint16(0x7FC0)
    )
    assert not arena[0].any()
    assert (arena[1].view(np.uint16) == 0x7FC0).all()
    ((launch, counts),) = device.launched
    assert counts.steps < 250  # a byte a thread would take 1,000
    assert b"st.global.v4.u32" in device.compiled(launch.source)[0].ptx


@CAPABILITIES
@pytest.mark.parametrize("gather", [True, False], ids=["gather", "scatter"])
def test_pieces(
    seed: int, device: InterpretedDevice, capability: tuple[int, int], gather: bool
) -> None:
    rng = np.random.default_rng(seed)
    spec, written = (GATHER, "staging") if gather else (SCATTER, "arena")
    for _ in range(SHAPES[capability]):
        device.clear()
        unit = int(rng.choice([1, 4, 16]))
        arguments = spec.make_inputs(
            rng,
            num_frames=6,
            frame_bytes=-(-cuts(rng, 1, 64, 4096, 40000, 70000) // unit) * unit,
            num_pieces=int(rng.integers(0, 6)),
            unit=unit,
        )
        arguments["ids"] = arguments["ids"].astype(integers(rng))
        expected = spec.reference(arguments)
        limit = int(rng.integers(1, 9))
        function = cuda_kernels.gather_frames if gather else cuda_kernels.scatter_frames
        function(**on_device(device, arguments, written), max_blocks=limit)
        assert same_bits(arguments[written], expected)
        assert all(launch.grid[0] <= limit for launch, _ in device.launched)


@CAPABILITIES
def test_frames_far_apart(device: InterpretedDevice) -> None:
    """Case 71: frame ids times strides pass 2**31 and 2**32; index arithmetic is int64."""
    from cuda_kernels.cuda.kernel import Launch
    from cuda_kernels.frames import cuda_call
    from tests.ptx.machine import Buffer

    stride, size = 3 * 2**30 + 4096, 256
    base = 1 << 44
    frames = [np.full(size, 10 + i, np.uint8) for i in range(4)]
    staging = np.zeros((4, size), np.uint8)
    ids = np.array([3, 1, 0, 2], np.int32)
    places = device.array(ids), device.array(staging, writable=True)
    for i, data in enumerate(frames):
        device.buffers.append(Buffer(f"frame {i}", base + i * stride, data))
    arguments = (
        places[1].address, size, 0, base, stride, places[0].address, 4, size,
        cuda_call.CHUNK_BYTES, 1,
    )  # fmt: skip
    device.launch(Launch(cuda_call.KERNELS[0, 4], (2, 1, 1), arguments), 0)
    assert staging[:, 0].tolist() == [13, 11, 10, 12]


# -- what is refused ------------------------------------------------------------------------------


@CAPABILITIES
def test_arrays_on_different_sides_are_refused(device: InterpretedDevice) -> None:
    arena = np.zeros((2, 64), np.uint8)
    ids = np.array([0], np.int32)
    with pytest.raises(TypeError, match="ids must be a DeviceArray as staging is"):
        cuda_kernels.gather_frames(
            device.array(np.zeros((1, 64), np.uint8)), device.array(arena), ids
        )
    other = InterpretedDevice((9, 0))
    with pytest.raises(TypeError, match="different devices"):
        cuda_kernels.gather_frames(
            device.array(np.zeros((1, 64), np.uint8)), other.array(arena), device.array(ids)
        )


@CAPABILITIES
def test_a_frame_id_past_the_arena_is_found(device: InterpretedDevice) -> None:
    with pytest.raises(PtxError):
        cuda_kernels.gather_frames(
            device.array(np.zeros((1, 64), np.uint8), writable=True),
            device.array(np.zeros((2, 64), np.uint8)),
            device.array(np.array([2], np.int32)),
        )
    with pytest.raises(OutOfBounds):
        cuda_kernels.fill_frames(
            device.array(np.zeros((2, 64), np.uint8), writable=True),
            device.array(np.array([2], np.int32)),
            np.uint8(1),
        )
