"""`kvmem.ops` on a GPU: on the double of one (tests/cuda_double), what is launched, FakeTensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cuda_kernels.attention import cuda_call as attention_call
from cuda_kernels.attention.cuda_call import workspace_elements
from cuda_kernels.block_copy import cuda_call as block_copy_call
from cuda_kernels.cache_write import cuda_call as cache_write_call
from cuda_kernels.cuda.array import DeviceArray
from cuda_kernels.cuda.kernel import Launch
from kvmem import ops
from kvmem.errors import DeviceUnavailable, ShapeError
from kvmem.store.cuda.raw_side import GpuSide
from kvmem.store.raw_tensors import HOST, require, side_of
from tests.cuda_double.kernels import double_kernels, view
from tests.cuda_double.opening import Double

FRAMES, BLOCK, HEADS, DIM, VALUE_DIM = 9, 8, 2, 16, 24
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def double(seed: int, monkeypatch: pytest.MonkeyPatch) -> Double:
    """Every tensor is taken for one of a GPU that isn't there, until the test ends."""
    made = Double.new(seed)
    double_kernels(monkeypatch)
    gpu = GpuSide(made.cuda)
    monkeypatch.setattr(ops, "side_of", lambda name, tensor: gpu)
    return made


def planes(dtype: torch.dtype, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    split = HEADS * BLOCK * DIM
    arena = torch.randn(FRAMES, split + HEADS * BLOCK * VALUE_DIM, generator=draw).to(dtype)
    key = arena[:, :split].view(FRAMES, HEADS, BLOCK, DIM).transpose(1, 2)
    return key, arena[:, split:].view(FRAMES, HEADS, BLOCK, VALUE_DIM).transpose(1, 2)


def attention(seed: int, dtype: torch.dtype) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    key, value = planes(dtype, draw)
    return {
        "query": torch.randn(7, 4, DIM, generator=draw).to(dtype),
        "key_cache": key,
        "value_cache": value,
        "block_table": torch.tensor([[3, 1, 0], [7, 4, 8]], dtype=torch.int32),
        "seq_lens": torch.tensor([11, 24]),
        "query_start": torch.tensor([0, 1, 7]),
    }


def writes(seed: int, dtype: torch.dtype) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    key, value = planes(dtype, draw)
    return {
        "key": torch.randn(3, HEADS, DIM, generator=draw).to(dtype),
        "value": torch.randn(3, HEADS, VALUE_DIM, generator=draw).to(dtype),
        "key_cache": key,
        "value_cache": value,
        "slot_mapping": torch.tensor([17, -1, 71]),
    }


def copies(seed: int, dtype: torch.dtype) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "caches": [*planes(dtype, draw), *planes(dtype, draw)],
        "source": torch.tensor([1, 2, 4]),
        "target": torch.tensor([5, 6, 4]),
        "num_tokens": torch.tensor([8, 3, 1]),
    }


def results(op: Any, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """What an op returned, and all that it may have written."""
    returned = op(**arguments) or ()
    caches = arguments.get("caches") or [arguments["key_cache"], arguments["value_cache"]]
    return [*returned, *caches]


def stretched(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, no two of them side by side."""
    wide = torch.full((*tensor.shape, 2), 1 << 20, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


INTEGER = {
    ops.paged_attention: ("block_table", "seq_lens", "query_start"),
    ops.write_kv: ("slot_mapping",),
    ops.copy_blocks: ("source", "target", "num_tokens"),
}
CASES = [(ops.paged_attention, attention), (ops.write_kv, writes), (ops.copy_blocks, copies)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "make"), CASES)
@pytest.mark.parametrize("tables", ["plain", "strided", "of two dtypes"])
def test_as_on_the_host(
    seed: int,
    double: Double,
    monkeypatch: pytest.MonkeyPatch,
    op: Any,
    make: Callable[[int, torch.dtype], dict[str, Any]],
    dtype: torch.dtype,
    tables: str,
) -> None:
    arguments = make(seed, dtype)
    for name in INTEGER[op]:
        if tables == "strided":
            arguments[name] = stretched(arguments[name])
    if tables == "of two dtypes":
        arguments[INTEGER[op][-1]] = arguments[INTEGER[op][-1]].int()
    found = results(op, arguments)
    assert double.streams.log, "nothing was queued on the GPU"
    monkeypatch.setattr(ops, "side_of", side_of)
    for one, other in zip(found, results(op, make(seed, dtype)), strict=True):
        assert torch.equal(one, other)


def test_rules_of_attention(seed: int, double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    slopes = torch.linspace(0.1, 0.4, 8)[::2]
    given = attention(seed, torch.float32) | {
        "scale": 0.3, "window": 9, "softcap": 5.0, "alibi": slopes, "sinks": slopes - 0.2,
        "max_seq_len": 24,
    }  # fmt: skip
    on_gpu = ops.paged_attention(**given)
    monkeypatch.setattr(ops, "side_of", side_of)
    for one, other in zip(on_gpu, ops.paged_attention(**given), strict=True):
        assert torch.equal(one, other)


class Recorder:
    """Keeps what the kernels would be launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[Launch, int]] = []

    def launch(self, launch: Launch, stream: int) -> None:
        self.launches.append((launch, stream))


def recorded(
    seed: int, monkeypatch: pytest.MonkeyPatch, op: Any, arguments: dict[str, Any]
) -> list[tuple[Launch, int]]:
    cuda, kernels = Double.new(seed).cuda, Recorder()
    cuda.kernels = kernels
    monkeypatch.setattr(ops, "side_of", lambda name, tensor: GpuSide(cuda))
    with cuda.torch.stream(cuda.new_stream()):
        handle = cuda.current_stream().cuda_stream
        op(**arguments)
    assert {stream for _, stream in kernels.launches} == {handle}
    return kernels.launches


def test_launches(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the caller's stream, with the caller's addresses; rows are cut where a batch is small."""
    given = attention(seed, torch.float32)
    long = given | {
        "block_table": torch.zeros(2, 512, dtype=torch.int32),
        "query_start": torch.tensor([0, 1, 2]),
        "query": given["query"][:2],
    }
    (first, _), (merge, _) = recorded(seed, monkeypatch, ops.paged_attention, long)
    assert (first.source.maker, merge.source.maker) == ("attend", "merge")
    assert first.arguments[0] == given["query"].data_ptr()
    assert given["key_cache"].data_ptr() in first.arguments
    assert given["value_cache"].data_ptr() in first.arguments
    assert given["seq_lens"].data_ptr() in first.arguments
    assert first.grid[2] == 512 * BLOCK // 512

    bounded = recorded(seed, monkeypatch, ops.paged_attention, long | {"max_seq_len": 500})
    assert [launch.grid[2] for launch, _ in bounded] == [1]

    ((write, _),) = recorded(seed, monkeypatch, ops.write_kv, writes(seed, torch.float32))
    assert write.grid == (3, 2, 1)
    both = recorded(seed, monkeypatch, ops.copy_blocks, copies(seed, torch.float32))
    assert [launch.grid for launch, _ in both] == [(3, 1, 1)] * 4


@pytest.mark.parametrize(("op", "make"), CASES)
@pytest.mark.parametrize("tables", ["strided", "of two dtypes"])
def test_kernels_get_packed_integers(
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    op: Any,
    make: Callable[[int, torch.dtype], dict[str, Any]],
    tables: str,
) -> None:
    """A kernel takes an address and bytes an element, no strides: the numbers lie side by side, of
    one dtype, and are still there when it is launched."""
    arguments, wanted = make(seed, torch.float32), make(seed, torch.float32)
    for name in INTEGER[op]:
        if tables == "strided":
            arguments[name] = stretched(arguments[name])
    if tables == "of two dtypes":
        arguments[INTEGER[op][-1]] = arguments[INTEGER[op][-1]].int()
    found: list[list[DeviceArray]] = []

    def keep(arrays: list[Any]) -> None:
        assert all(array.flags.c_contiguous for array in arrays)
        assert len({array.dtype for array in arrays}) == 1
        names = [name for name in INTEGER[op] if name != "block_table"]
        for name, array in zip(names, arrays, strict=True):
            assert view(array).tolist() == wanted[name].tolist()
        found.append(arrays)

    monkeypatch.setattr(attention_call, "attend", lambda request, _: keep([*request.rows[2:]]))
    monkeypatch.setattr(cache_write_call, "write", lambda slots, *_: keep([slots]))
    monkeypatch.setattr(block_copy_call, "copy", lambda arena, size, pairs, *_: keep([*pairs]))
    gpu = GpuSide(Double.new(seed).cuda)
    monkeypatch.setattr(ops, "side_of", lambda name, tensor: gpu)
    op(**arguments)
    assert found


def test_room_for_splits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as the kernels ask for, and none where a batch makes blocks enough."""
    from kvmem.store.cuda.arrays import workspace_for

    query = torch.zeros(4, 8, DIM)
    room = workspace_for(query, 2, VALUE_DIM, 5000, None)
    assert room is not None
    assert room.shape == (workspace_elements(4, 8, VALUE_DIM, 5000),)
    assert workspace_for(torch.zeros(1, 1, 1).expand(8192, 32, DIM), 8, DIM, 131072, None) is None
    for num_tokens in (131, 132, 133):  # 2 KV heads: 132 tokens make 264 blocks, half of the wanted
        given = attention(seed, torch.float32) | {
            "query": torch.zeros(num_tokens, 4, DIM),
            "block_table": torch.zeros(1, 512, dtype=torch.int32),
            "seq_lens": torch.tensor([4096]),
            "query_start": torch.tensor([0, num_tokens]),
        }
        room = workspace_for(given["query"], HEADS, VALUE_DIM, 4096, None)
        launches = recorded(seed, monkeypatch, ops.paged_attention, given)
        assert (len(launches) == 2) <= (room is not None)
        assert (room is None) == (num_tokens == 133)


def test_two_threads_launch_one_after_the_other(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, worst, lock = 0, 0, threading.Lock()

    class Watching(Recorder):
        def launch(self, launch: Launch, stream: int) -> None:
            nonlocal inside, worst
            with lock:
                inside += 1
                worst = max(worst, inside)
            threading.Event().wait(0.001)
            with lock:
                inside -= 1

    cuda = Double.new(seed).cuda
    cuda.kernels = Watching()
    gpu = GpuSide(cuda)
    monkeypatch.setattr(ops, "side_of", lambda name, tensor: gpu)
    given = [writes(seed, torch.float32) for _ in range(4)]
    threads = [threading.Thread(target=lambda a=a: ops.write_kv(**a)) for a in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worst == 1


def test_rows_that_are_not_contiguous(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = writes(seed, torch.float32)
    strided = rows["key"].transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="key must have contiguous rows"):
        recorded(seed, monkeypatch, ops.write_kv, rows | {"key": strided})


def test_what_a_gpu_refuses(seed: int, double: Double) -> None:
    given = attention(seed, torch.float32)
    for changes, error, words in (
        ({"max_seq_len": -1}, ValueError, "max_seq_len=-1"),
        ({"window": 0}, ValueError, "window must be"),
        ({"query": given["query"].half()}, ShapeError, "query has dtype"),
        ({"seq_lens": given["seq_lens"][:1]}, ShapeError, "seq_lens must have 2"),
        ({"alibi": torch.ones(3)}, ShapeError, "alibi has shape"),
        ({"block_table": given["block_table"].long()}, TypeError, "block_table has dtype"),
    ):
        with pytest.raises(error, match=words):
            ops.paged_attention(**(given | changes))
    assert not double.streams.log


def test_tensors_of_two_devices(seed: int) -> None:
    given = attention(seed, torch.float32)
    with FakeTensorMode():
        query = torch.empty(7, 4, DIM, device="cuda")
    with pytest.raises(ShapeError, match="query is on cuda:0; .* are on cpu"):
        require(HOST, "query", query, (None, None, DIM), (torch.float32,))
    with pytest.raises(ShapeError, match="key_cache is on meta"):
        side_of("key_cache", given["key_cache"].to("meta"))


def test_without_a_gpu_the_error_says_so(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with FakeTensorMode():
        tensor = torch.empty(1, device="cuda")
    with pytest.raises(DeviceUnavailable, match="torch"):
        side_of("key_cache", tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fake_tensors_of_a_gpu(seed: int, dtype: torch.dtype) -> None:
    """They need no GPU, and tell what comes on one: shapes, dtypes, strides, the device."""
    real = ops.paged_attention(**attention(seed, dtype))
    given = {**writes(seed, dtype), **copies(seed, dtype), **attention(seed, dtype)}
    with FakeTensorMode():
        fake = {
            name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")
            for name, t in given.items()
            if isinstance(t, torch.Tensor)
        }
        found = ops.paged_attention(**{n: fake[n] for n in attention(seed, dtype)}, max_seq_len=24)
        assert ops.write_kv(**{n: fake[n] for n in writes(seed, dtype)}) is None
        moved = {n: fake[n] for n in ("source", "target", "num_tokens")}
        assert ops.copy_blocks([fake["key_cache"]], **moved) is None
    for one, other in zip(found, real, strict=True):
        assert one.device == torch.device("cuda:0")
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
