"""The moves on a GPU against the byte-exact references."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cuda_kernels
from cuda_kernels.block_copy.spec import SPEC as COPY
from cuda_kernels.cache_write.spec import SPEC as WRITE
from cuda_kernels.cuda.array import DeviceArray
from cuda_kernels.frames.spec import GATHER, SCATTER
from cuda_kernels.frames.spec import SPEC as MOVE

pytestmark = pytest.mark.gpu

SHAPES = max(5, 40 * int(os.environ.get("KVMEM_GPU_SHAPES", "1")))


def draws(seed: int, device: Any) -> Iterator[np.random.Generator]:
    """The generator once for each shape, the device emptied before."""
    rng = np.random.default_rng(seed)
    for _ in range(SHAPES):
        device.clear()
        yield rng


def on_device(device: Any, a: dict[str, Any], written: str, shift: int = 0) -> dict[str, Any]:
    """The arrays mapped on the device, ``written`` to be written, at a misaligned address."""
    return {
        name: device.array(
            value, writable=name == written, misaligned=shift if name == written else 0
        )
        if isinstance(value, np.ndarray)
        else value
        for name, value in a.items()
    }


def check(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.array_equal(found.view(np.uint8), expected.view(np.uint8))


def integers(rng: np.random.Generator) -> type[np.int32] | type[np.int64]:
    return (np.int32, np.int64)[int(rng.integers(2))]


def test_write_kv(seed: int, device: Any) -> None:
    for rng in draws(seed, device):
        even = rng.random() < 0.5
        dims = [int(rng.choice([64, 128]) if even else rng.integers(1, 130)) for _ in "kv"]
        a = WRITE.make_inputs(
            rng, dtype=str(rng.choice(list(WRITE.tolerance))),
            num_tokens=int(rng.choice([0, 1, 17, 300])), num_kv_heads=int(rng.integers(1, 9)),
            head_dim=dims[0], value_dim=dims[1], block_size=int(rng.choice([1, 16, 64])),
            skipped=float(rng.choice([0, 0.2, 1])), layout=str(rng.choice(["HND", "NHD"])),
        )  # fmt: skip
        a["slot_mapping"] = a["slot_mapping"].astype(integers(rng))
        if even:  # so that rows lie at multiples of 16 bytes, as kvmem's own do
            a["key_offset"] = 0
            a["value_offset"] -= a["value_offset"] % 8
            a["arena"] = np.pad(a["arena"], ((0, 0), (0, -a["arena"].shape[1] % 8)))
        expected = WRITE.reference(a)
        shift = 0 if even else int(rng.integers(0, 8)) * a["key"].itemsize
        cuda_kernels.write_kv(**on_device(device, a, "arena", shift))
        check(a["arena"], expected)


def test_write_kv_in_fp8(seed: int, device: Any) -> None:
    for rng in draws(seed, device):
        a = WRITE.make_inputs(
            rng, dtype=str(rng.choice(list(WRITE.tolerance))), kv_dtype="fp8_e4m3",
            num_tokens=int(rng.choice([0, 1, 17, 100])), num_kv_heads=int(rng.integers(1, 9)),
            head_dim=int(rng.choice([7, 64, 128])), value_dim=int(rng.choice([9, 64, 128])),
            block_size=int(rng.choice([1, 16, 64])), layout=str(rng.choice(["HND", "NHD"])),
        )  # fmt: skip
        expected = WRITE.reference(a)
        no_scales = dict.fromkeys(("key_scale", "value_scale"))
        try:
            cuda_kernels.write_kv(**on_device(device, a | no_scales, "arena"))
        except ValueError as error:
            pytest.skip(str(error))
        cuda_kernels.write_kv(**on_device(device, a, "arena"))
        check(a["arena"], expected)


def test_copy_blocks(seed: int, device: Any) -> None:
    for rng in draws(seed, device):
        pairs = int(rng.integers(0, 20))
        a = COPY.make_inputs(
            rng, element=str(rng.choice(["uint8", "uint16", "float32"])),
            num_frames=2 * pairs + 1, num_layers=int(rng.integers(1, 4)),
            num_kv_heads=int(rng.integers(1, 5)), head_dim=int(rng.choice([3, 16, 64, 128])),
            value_dim=int(rng.choice([5, 16, 64, 128])), block_size=int(rng.choice([1, 16, 64])),
            num_pairs=pairs,
        )  # fmt: skip
        if pairs and rng.random() < 0.3:
            a["source"][0] = a["target"][0]  # a pair (i, i) does nothing
        kinds = integers(rng), integers(rng)
        for name in ("source", "target", "num_tokens"):
            a[name] = a[name].astype(kinds[0])
        for name in ("plane_offset", "plane_rows", "plane_width"):
            a[name] = a[name].astype(kinds[1])
        expected = COPY.reference(a)
        cuda_kernels.copy_blocks(**on_device(device, a, "arena"))
        check(a["arena"], expected)


def test_move_frames(seed: int, device: Any) -> None:
    for rng in draws(seed, device):
        size = int(rng.choice([1, 16, 4096, 32768 + 16, 40001, 100_000]))
        a = MOVE.make_inputs(rng, num_frames=30, frame_bytes=size, num_moves=int(rng.integers(30)))
        for name in ("target_ids", "source_ids"):
            a[name] = a[name].astype(integers(rng))
        expected = MOVE.reference(a)
        most = int(rng.choice([1, 7, 32, 500]))
        cuda_kernels.move_frames(**on_device(device, a, "target_arena"), max_blocks=most)
        check(a["target_arena"], expected)


@pytest.mark.parametrize("gather", [True, False], ids=["gather", "scatter"])
def test_pieces(seed: int, device: Any, gather: bool) -> None:
    spec, written = (GATHER, "staging") if gather else (SCATTER, "arena")
    function = cuda_kernels.gather_frames if gather else cuda_kernels.scatter_frames
    for rng in draws(seed, device):
        unit = int(rng.choice([1, 4, 16]))
        a = spec.make_inputs(
            rng, num_frames=20, frame_bytes=int(rng.choice([16, 4096, 70_000])),
            num_pieces=int(rng.integers(0, 20)), unit=unit,
        )  # fmt: skip
        a["ids"] = a["ids"].astype(integers(rng))
        expected = spec.reference(a)
        most = int(rng.choice([1, 7, 32, 500]))
        function(**on_device(device, a, written), max_blocks=most)
        check(a[written], expected)


# -- what only a GPU can show ----------------------------------------------------------------------


def test_offsets_past_four_gigabytes(real_device: Any) -> None:
    """Case 71 on real memory: frames whose bytes lie behind 2**31 and 2**32."""
    torch, frame_bytes = real_device.torch, 1 << 20
    frames = 4100
    if torch.cuda.mem_get_info()[0] < (frames + 500) * frame_bytes:
        pytest.skip("less than 5 GiB of GPU memory is free")
    arena = torch.zeros((frames, frame_bytes), dtype=torch.uint8, device="cuda")
    ids = np.array([4099, 2048, 0, 4096], np.int32)
    staging = np.random.default_rng(0).integers(0, 256, (4, frame_bytes), np.uint8)
    far = DeviceArray(arena.data_ptr(), tuple(arena.shape), np.dtype(np.uint8), real_device)
    cuda_kernels.scatter_frames(far, real_device.array(ids), real_device.array(staging))
    found = arena[torch.from_numpy(ids).long().cuda()].cpu().numpy()
    assert np.array_equal(found, staging)
    untouched = torch.ones(frames, dtype=torch.bool, device="cuda")
    untouched[torch.from_numpy(ids).long().cuda()] = False
    assert int(arena.amax(1)[untouched].max()) == 0


@pytest.mark.parametrize("way", ["out", "in"])
def test_frames_of_pinned_host_memory(real_device: Any, seed: int, way: str) -> None:
    """A swap by the kernel itself, on a stream of its own."""
    torch, rng = real_device.torch, np.random.default_rng(seed)
    shape = (40, 65536 + 16)
    host = torch.from_numpy(rng.integers(0, 256, shape, np.uint8)).pin_memory()
    card = torch.from_numpy(rng.integers(0, 256, shape, np.uint8)).cuda()
    ids = [rng.permutation(40)[:25].astype(np.int32) for _ in range(2)]
    expected = (host if way == "out" else card).cpu().numpy().copy()
    source = (card if way == "out" else host).cpu().numpy()
    expected[ids[0]] = source[ids[1]]

    def whole(tensor: Any) -> DeviceArray:
        return DeviceArray(tensor.data_ptr(), shape, np.dtype(np.uint8), real_device.gpu)

    places = [torch.from_numpy(one).cuda() for one in ids]
    target_ids, source_ids = (
        DeviceArray(place.data_ptr(), (25,), np.dtype(np.int32), real_device.gpu)
        for place in places
    )
    target, origin = (host, card) if way == "out" else (card, host)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    cuda_kernels.move_frames(
        whole(target), target_ids, whole(origin), source_ids, stream=stream.cuda_stream
    )
    stream.synchronize()
    assert np.array_equal(target.cpu().numpy(), expected)
