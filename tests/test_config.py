"""Config: what it refuses and how it says so, what it resolves, what ``plan`` promises."""

from __future__ import annotations

import dataclasses
import json
import math
import random

import numpy as np
import pytest
import torch

import kvmem
from kvmem import geometry
from kvmem.memory_check import check_memory

LAYER = kvmem.LayerSpec(num_kv_heads=3, head_dim=64)
GOOD = {"num_layers": 4, "num_kv_heads": 3, "head_dim": 64, "device_blocks": 8}
REFUSED = kvmem.ConfigError


def config(**changes: object) -> kvmem.Config:
    """The good configuration with ``changes``; a value of None drops the key."""
    settings = {k: v for k, v in (GOOD | changes).items() if v is not None}
    return kvmem.Config(**settings)  # type: ignore[arg-type]


LATER = r"not in this version; supported: "
BAD = [
    # blocks
    ({"device_blocks": 0}, REFUSED, r"device_blocks=0 .*integer >= 1"),
    ({"device_blocks": -1}, REFUSED, r"device_blocks=-1 .*integer >= 1"),
    ({"device_blocks": 2**63}, REFUSED, r"device_blocks=9223372036854775808 .*at most 2147483645"),
    ({"device_blocks": 2**31 - 2}, REFUSED, r"at most 2147483645"),
    ({"device_blocks": 2.5}, TypeError, r"device_blocks .*integer >= 1.*2\.5 \(float\)"),
    ({"device_blocks": 8.0}, TypeError, r"device_blocks .*integer >= 1"),
    ({"device_blocks": "8"}, TypeError, r"device_blocks .*integer >= 1.*'8' \(str\)"),
    ({"device_blocks": True}, TypeError, r"device_blocks .*integer >= 1.*True \(bool\)"),
    ({"device_blocks": np.True_}, TypeError, r"device_blocks .*integer >= 1"),
    ({"device_blocks": math.nan}, TypeError, r"device_blocks .*integer >= 1"),
    ({"device_blocks": torch.tensor(2.5)}, TypeError, r"device_blocks .*integer >= 1"),
    ({"device_blocks": [8]}, TypeError, r"device_blocks .*\(list\)"),
    ({"device_blocks": None}, REFUSED, r"device tier is missing.*device_blocks.*device_memory"),
    ({"host_blocks": -1}, REFUSED, r"host_blocks=-1 .*integer >= 0"),
    ({"host_blocks": 2**63}, REFUSED, r"host_blocks=.*integer >= 0"),
    ({"host_blocks": 1.0}, TypeError, r"host_blocks .*integer >= 0"),
    ({"host_blocks": "8"}, TypeError, r"host_blocks .*integer >= 0"),
    ({"host_blocks": False}, TypeError, r"host_blocks .*integer >= 0"),
    ({"device_blocks": 0, "host_blocks": 4}, REFUSED, r"device_blocks=0 .*integer >= 1"),
    # memory
    ({"device_memory": "1GiB"}, REFUSED, r"device_blocks=8 and device_memory='1GiB'.*one of"),
    ({"host_blocks": 0, "host_memory": "1GiB"}, REFUSED, r"host_blocks=0 and host_memory="),
    ({"device_blocks": None, "device_memory": 0.0}, REFUSED, r"device_memory=0\.0 .*0 < x < 1"),
    ({"device_blocks": None, "device_memory": 1.0}, REFUSED, r"device_memory=1\.0 .*0 < x < 1"),
    ({"device_blocks": None, "device_memory": 1.5}, REFUSED, r"device_memory=1\.5 .*0 < x < 1"),
    ({"device_blocks": None, "device_memory": -0.5}, REFUSED, r"device_memory=-0\.5 .*0 < x < 1"),
    ({"device_blocks": None, "device_memory": math.nan}, REFUSED, r"device_memory=nan .*0 < x"),
    ({"device_blocks": None, "device_memory": math.inf}, REFUSED, r"device_memory=inf .*0 < x"),
    ({"device_blocks": None, "device_memory": 0}, REFUSED, r"device_memory=0 .*integer >= 1"),
    ({"device_blocks": None, "device_memory": -5}, REFUSED, r"device_memory=-5 .*integer >= 1"),
    ({"device_blocks": None, "device_memory": 2**63}, REFUSED, r"device_memory=.*out of range"),
    ({"device_blocks": None, "device_memory": 10}, REFUSED, r"device_memory=10 .*holds no block"),
    ({"device_blocks": None, "device_memory": "8GB!"}, REFUSED, r"device_memory='8GB!' .*GiB"),
    ({"device_blocks": None, "device_memory": "GiB"}, REFUSED, r"device_memory='GiB' .*GiB"),
    ({"device_blocks": None, "device_memory": ""}, REFUSED, r"device_memory='' .*GiB"),
    ({"device_blocks": None, "device_memory": "-1GiB"}, REFUSED, r"device_memory='-1GiB'"),
    ({"device_blocks": None, "device_memory": "٣GiB"}, REFUSED, r"device_memory="),
    ({"device_blocks": None, "device_memory": "1XiB"}, REFUSED, r"device_memory='1XiB' .*GiB"),
    ({"device_blocks": None, "device_memory": "9" * 500}, REFUSED, r"device_memory=.*\.\.\."),
    ({"device_blocks": None, "device_memory": "9999999999TiB"}, REFUSED, r"out of range"),
    ({"device_blocks": None, "device_memory": True}, TypeError, r"device_memory .*True"),
    ({"device_blocks": None, "device_memory": [1]}, TypeError, r"device_memory .*list"),
    ({"host_memory": 1.0}, REFUSED, r"host_memory=1\.0 .*0 < x < 1"),
    ({"host_memory": 1}, REFUSED, r"host_memory=1 .*holds no block"),
    # block size
    ({"block_size": 0}, REFUSED, r"block_size=0 .*power of two: 1, 2, 4, .*1024"),
    ({"block_size": -4}, REFUSED, r"block_size=-4 .*power of two"),
    ({"block_size": 3}, REFUSED, r"block_size=3 .*power of two"),
    ({"block_size": 2048}, REFUSED, r"block_size=2048 .*1024"),
    ({"block_size": 2**70}, REFUSED, r"block_size=1180591620717411303424 .*1024"),
    ({"block_size": 64.0}, TypeError, r"block_size .*64\.0"),
    ({"block_size": "64"}, TypeError, r"block_size .*'64'"),
    # geometry
    ({"num_layers": 0}, REFUSED, r"num_layers=0 .*>= 1 \(at most 4096\)"),
    ({"num_layers": 5000}, REFUSED, r"num_layers=5000 .*at most 4096"),
    ({"num_layers": 2.0}, TypeError, r"num_layers .*2\.0"),
    ({"num_kv_heads": 0}, REFUSED, r"num_kv_heads=0 .*>= 1"),
    ({"num_kv_heads": -3}, REFUSED, r"num_kv_heads=-3 .*>= 1"),
    ({"head_dim": 0}, REFUSED, r"head_dim=0 .*>= 1"),
    ({"head_dim": 10**9}, REFUSED, r"head_dim=1000000000 .*at most"),
    ({"head_dim": "64"}, TypeError, r"head_dim .*'64'"),
    ({"v_head_dim": 0}, REFUSED, r"v_head_dim=0 .*>= 1"),
    ({"v_head_dim": 1.5}, TypeError, r"v_head_dim .*1\.5"),
    ({"window": 0}, REFUSED, r"window=0 .*>= 1"),
    ({"window": -1}, REFUSED, r"window=-1 .*>= 1"),
    ({"window": 2.5}, TypeError, r"window .*2\.5"),
    # names
    ({"dtype": "float"}, REFUSED, r"dtype='float' .*float32, float16, bfloat16.*did you mean"),
    ({"dtype": torch.float64}, REFUSED, r"dtype='float64' .*supported: float32"),
    ({"dtype": torch.int8}, REFUSED, LATER + "float32"),
    ({"dtype": torch.float8_e4m3fn}, REFUSED, LATER + "float32"),
    ({"dtype": "fp8"}, REFUSED, LATER + "float32"),
    ({"dtype": 4}, TypeError, r"dtype .*torch dtype"),
    ({"dtype": np.float32}, TypeError, r"dtype .*torch dtype"),
    ({"device": "cuda:"}, REFUSED, r"device='cuda:' is unknown; .*'cuda:1'"),
    ({"device": "cuda:-1"}, REFUSED, r"device='cuda:-1' is unknown"),
    ({"device": "cuda:07"}, REFUSED, r"device='cuda:07' is unknown"),
    ({"numa_node": 0}, REFUSED, r"numa_node=0 needs device='cuda', not 'cpu'"),
    ({"numa_node": -1, "device": "cuda"}, REFUSED, r"numa_node=-1 is out of range"),
    ({"numa_node": "near", "device": "cuda"}, REFUSED, r"numa_node='near'.*'gpu', a number"),
    ({"numa_node": 0.5, "device": "cuda"}, TypeError, r"numa_node must be an int"),
    ({"device": "gpu"}, REFUSED, r"device='gpu' is unknown; known: 'cpu', 'sim', 'cuda'"),
    ({"device": 0}, TypeError, r"device must be a str"),
    ({"tier_policy": "exclusive"}, REFUSED, r"'exclusive' needs a host tier"),
    ({"tier_policy": "write_through"}, REFUSED, r"'write_through' needs a host tier"),
    (
        {"watermarks": 0.5, "host_blocks": 4},
        TypeError,
        r"watermarks is 0.5; allowed: None",
    ),
    ({"watermarks": (0.5,), "host_blocks": 4}, TypeError, r"watermarks is \(0.5,\); allowed"),
    ({"watermarks": (0.1, True), "host_blocks": 4}, TypeError, r"True is no number"),
    ({"watermarks": (0.5, 0.2), "host_blocks": 4}, REFUSED, r"out of range; .*low <= high <= 1"),
    ({"watermarks": (0.0, 0.2), "host_blocks": 4}, REFUSED, r"out of range; .*0 < low"),
    ({"watermarks": (0.1, 1.5), "host_blocks": 4}, REFUSED, r"out of range"),
    ({"watermarks": (float("nan"), 1), "host_blocks": 4}, REFUSED, r"out of range"),
    ({"watermarks": (0.1, 0.2)}, REFUSED, r"tier_policy is 'none': leave them out"),
    ({"tier_policy": "writeback", "host_blocks": 4}, REFUSED, r"did you mean 'write_back'"),
    ({"tier_policy": "write_back"}, REFUSED, r"needs a host tier: host_blocks.*host_memory"),
    ({"tier_policy": "write_back", "host_blocks": 0}, REFUSED, r"needs a host tier"),
    ({"tier_policy": True}, TypeError, r"tier_policy must be a str"),
    ({"eviction": "lfu"}, REFUSED, LATER + "'lru'"),
    ({"eviction": "LRU"}, REFUSED, r"eviction='LRU' is unknown; .*did you mean 'lru'"),
    ({"eviction": 1}, TypeError, r"eviction must be a str"),
    ({"zero_on_free": "allways"}, REFUSED, r"did you mean 'always'"),
    ({"zero_on_free": "nevr"}, REFUSED, r"did you mean 'never'"),
    ({"zero_on_free": True}, TypeError, r"zero_on_free must be a str"),
    ({"sync": 1}, TypeError, r"sync must be True or False, not 1"),
    ({"debug": "yes"}, TypeError, r"debug must be True or False, not 'yes'"),
    # layers
    ({"layers": [LAYER] * 3}, REFUSED, r"layers has 3 specs and num_layers=4"),
    ({"layers": []}, REFUSED, r"layers has 0 specs"),
    (
        {"layers": [LAYER] * 3 + [kvmem.LayerSpec(num_kv_heads=3, head_dim=64, window=8)]},
        REFUSED,
        r"layers\[3\] differs.*not in this version; supported: equal LayerSpecs",
    ),
    (
        {"layers": [LAYER] * 3 + [kvmem.LayerSpec(num_kv_heads=2, head_dim=64)]},
        REFUSED,
        r"layers\[3\] differs.*not in this version",
    ),
    (
        {"layers": [kvmem.LayerSpec(num_kv_heads=2, head_dim=64)] * 4},
        REFUSED,
        r"layers contradicts num_kv_heads.*make them agree",
    ),
    ({"layers": [LAYER] * 4, "window": 8}, REFUSED, r"layers contradicts .*window"),
    ({"layers": [LAYER] * 3 + ["x"]}, TypeError, r"layers\[3\] must be a LayerSpec"),
    ({"layers": "LLLL"}, TypeError, r"layers must be a sequence of LayerSpec"),
    ({"layers": iter([LAYER] * 4)}, TypeError, r"layers must be a sequence"),
    # keywords
    ({"num_layers": None}, TypeError, r"num_layers"),
    ({"device_block": 8}, TypeError, r"device_block"),
    # storage
    ({"kv_dtype": "fp8"}, REFUSED, LATER + "None .dtype, here float32., 'fp8_e4m3'"),
    ({"kv_dtype": "float8_e5m2"}, REFUSED, LATER + "None"),
    ({"kv_dtype": torch.int8}, REFUSED, LATER + "None"),
    ({"kv_dtype": "bfloat16"}, REFUSED, LATER + "None .dtype, here float32."),
    ({"kv_dtype": "e4m3"}, REFUSED, r"kv_dtype='e4m3' is unknown; .*did you mean 'fp8_e4m3'"),
    ({"kv_dtype": 8}, TypeError, r"kv_dtype must be .*not 8"),
    ({"k_scale": 1.0}, REFUSED, r"k_scale needs kv_dtype='fp8_e4m3'.*stored as float32"),
    ({"v_scale": [1.0], "kv_dtype": torch.float32}, REFUSED, r"v_scale needs kv_dtype="),
    ({"kv_dtype": "fp8_e4m3", "k_scale": 0}, REFUSED, r"layer 0, K/V head 0 is 0\.0; expected"),
    ({"kv_dtype": "fp8_e4m3", "k_scale": -1.0}, REFUSED, r"k_scale of layer 0.*1e-12 to"),
    ({"kv_dtype": "fp8_e4m3", "v_scale": float("nan")}, REFUSED, r"v_scale .* is nan"),
    ({"kv_dtype": "fp8_e4m3", "v_scale": [1, 1, 1e30]}, REFUSED, r"layer 0, K/V head 2 is "),
    ({"kv_dtype": "fp8_e4m3", "k_scale": [1, 2]}, REFUSED, r"broadcast to \(4, 3\)"),
    ({"kv_dtype": "fp8_e4m3", "k_scale": [[1], [1, 2]]}, REFUSED, r"k_scale is .*broadcast"),
    ({"kv_dtype": "fp8_e4m3", "k_scale": "1"}, TypeError, r"k_scale must be .*not '1'"),
    ({"kv_dtype": "fp8_e4m3", "k_scale": [True] * 3}, TypeError, r"k_scale must be"),
    ({"kv_dtype": "fp8_e4m3", "v_scale": object()}, TypeError, r"v_scale must be"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=lambda x: str(x)[:40])
def test_refused(changes: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        config(**changes)
    assert type(caught.value) is error
    assert len(str(caught.value)) <= 300
    config()  # and good ones still pass


@pytest.mark.parametrize("bad", [{"num_kv_heads": 0}, {"head_dim": -1}, {"window": 0}])
def test_layer_spec_refused(bad: dict[str, int]) -> None:
    name, value = next(iter(bad.items()))
    with pytest.raises(kvmem.ConfigError, match=f"{name}={value} .*>= 1"):
        kvmem.LayerSpec(**({"num_kv_heads": 3, "head_dim": 64} | bad))


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="positional"):
        kvmem.Config(4, 3, 64)  # type: ignore[misc]


def test_defaults() -> None:
    c = config()
    assert (c.block_size, c.device, c.dtype, c.v_head_dim) == (64, "cpu", torch.float32, 64)
    assert (c.device_blocks, c.host_blocks, c.tier_policy) == (8, 0, "none")
    assert (c.eviction, c.sync, c.debug, c.zero_on_free) == ("lru", False, False, "never")
    assert c.layers == (LAYER,) * 4
    assert config(host_blocks=1).tier_policy == "write_back"
    assert config(host_blocks=1, tier_policy="none").tier_policy == "none"


def test_values_become_plain() -> None:
    c = config(
        num_layers=np.int64(4), device_blocks=np.int32(8), block_size=torch.tensor(16),
        dtype="bfloat16", device=torch.device("cpu"), v_head_dim=32, window=np.int16(5),
    )  # fmt: skip
    assert type(c.num_layers) is int
    assert type(c.device_blocks) is int
    assert (c.block_size, c.dtype, c.device) == (16, torch.bfloat16, "cpu")
    assert {x.window for x in c.layers} == {5}
    assert c.layers[0].v_head_dim == 32


def test_layers_carry_the_window() -> None:
    spec = kvmem.LayerSpec(num_kv_heads=3, head_dim=64, window=128)
    c = config(layers=[spec] * 4)
    assert c.window == 128
    assert c == config(window=128)
    assert hash(c) == hash(config(window=128))


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().device_blocks = 9  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8GiB", 8 * 2**30), ("1.5 MiB", 3 * 2**19), ("64MB", 64 * 10**6), ("1048576", 2**20),
     (" 2 tib ", 2**41), ("600000B", 600000), (2**30, 2**30)],
)  # fmt: skip
def test_memory_holds_as_many_blocks_as_fit(text: str | int, expected: int) -> None:
    c = config(device_blocks=None, device_memory=text, block_size=16)
    plan = c.plan()
    assert plan.device_bytes <= expected < plan.device_bytes + plan.block_bytes


@pytest.mark.parametrize("debug", [False, True])
def test_share_of_the_free_memory(monkeypatch: pytest.MonkeyPatch, debug: bool) -> None:
    monkeypatch.setattr("kvmem.config.free_host_bytes", lambda: 10**9)
    c = config(device_blocks=None, device_memory=0.25, host_memory=0.5, debug=debug)
    plan = c.plan()
    assert plan.device_bytes <= 250_000_000 < plan.device_bytes + plan.block_bytes
    assert plan.host_bytes <= 500_000_000 < plan.host_bytes + plan.block_bytes


def test_plan_of_a_known_model() -> None:
    c = kvmem.Config(num_layers=30, num_kv_heads=3, head_dim=64, device_blocks=64, host_blocks=256)
    plan = c.plan()
    assert plan.token_bytes == 2 * 30 * 3 * 64 * 4 == 46_080
    assert plan.block_bytes == 64 * 46_080
    assert plan.device_bytes == 65 * plan.block_bytes  # the null frame is on top
    assert plan.host_bytes == 257 * plan.block_bytes
    assert (plan.device_tokens, plan.host_tokens) == (4096, 16384)
    assert plan.metadata_bytes == 320 * (96 + 4 * 64)
    assert json.loads(json.dumps(plan.to_dict()))["device_bytes"] == plan.device_bytes
    assert "256 host blocks" in plan.bound
    assert "64 blocks (4096 tokens)" in str(plan)
    debug = dataclasses.asdict(config(debug=True).plan())
    assert debug["device_bytes"] == 10 * debug["block_bytes"]  # null, eight blocks, guard
    assert debug["host_bytes"] == 0


def test_never_stuck_is_the_stated_bound() -> None:
    plan = config(block_size=16, device_blocks=4, host_blocks=6).plan()
    assert plan.never_stuck([])
    assert plan.never_stuck([64])
    assert not plan.never_stuck([65])  # never fits the device
    assert plan.never_stuck([64, 48, 48])  # 4 + 3 + 3 <= 6 + 4
    assert not plan.never_stuck([64, 48, 49])
    alone = config(block_size=16, device_blocks=4).plan()
    assert alone.never_stuck([32, 32])
    assert not alone.never_stuck([32, 33])
    assert "device" in alone.bound


def test_planes_lie_apart_and_aligned(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(50):
        layers, heads, key, value = (draw.randint(1, n) for n in (6, 9, 200, 200))
        size, element = 2 ** draw.randint(0, 7), draw.choice([2, 4])
        frame = geometry.uniform_frame(
            num_layers=layers, num_kv_heads=heads, head_dim=key, value_dim=value,
            block_size=size, element_bytes=element,
        )  # fmt: skip
        end = 0
        for index, plane in enumerate(frame.planes):
            assert (plane.layer, plane.is_value) == (index // 2, bool(index % 2))
            assert plane.offset_bytes % 64 == 0
            assert end <= plane.offset_bytes < end + 64
            width = value if plane.is_value else key
            assert plane.size_bytes == heads * size * width * element
            end = plane.offset_bytes + plane.size_bytes
        assert end <= frame.frame_bytes < end + 64
        assert frame.frame_bytes % 64 == 0
        blocks = draw.randint(1, 99)
        room = frame.arena_bytes(blocks)
        assert frame.blocks_in(room) == blocks
        assert frame.blocks_in(room - 1) == blocks - 1


def test_check_memory_names_what_fits() -> None:
    c = config(device_blocks=100, host_blocks=50, block_size=16)
    plan = c.plan()
    asked = plan.device_bytes + plan.host_bytes + plan.metadata_bytes
    check_memory(c, free_bytes=asked)
    with pytest.raises(kvmem.ConfigError, match=r"at most 149 blocks.*fit") as caught:
        check_memory(c, free_bytes=asked - 1)
    assert str(asked) in str(caught.value)
    assert len(str(caught.value)) <= 300
    with pytest.raises(kvmem.ConfigError, match="at most 0 blocks"):
        check_memory(c, free_bytes=1)
    huge = config(device_blocks=2**31 - 3)
    with pytest.raises(kvmem.ConfigError, match="free are"):
        check_memory(huge)


def test_error_tree() -> None:
    builtins = {
        "ConfigError": ValueError, "OutOfBlocks": MemoryError, "SequenceTooLong": ValueError,
        "UnknownSequence": KeyError, "NotResident": RuntimeError, "PinError": ValueError,
        "ShapeError": ValueError, "TierError": OSError, "TransferError": RuntimeError,
        "FormatError": ValueError, "CorruptEntry": Exception, "DeviceUnavailable": RuntimeError,
        "ManagerClosed": RuntimeError,
    }  # fmt: skip
    for name, base in builtins.items():
        error = getattr(kvmem, name)("a sentence's worth")
        assert isinstance(error, kvmem.KVMemError)
        assert isinstance(error, base)
        assert str(error) == "a sentence's worth"  # KeyError alone would quote it
    room = kvmem.OutOfBlocks("m", tier="host", needed=3, free=1, evictable=2, pinned=4)
    assert (room.tier, room.needed, room.free, room.evictable, room.pinned) == ("host", 3, 1, 2, 4)


@pytest.mark.parametrize(
    ("policy", "device", "host", "what"),
    [
        ("write_through", 8, 8, "host_blocks=8 add nothing to device_blocks=8; give more than 8"),
        ("write_through", 8, 9, ""),
        ("write_back", 100, 4, "host_blocks=4 add less than 1/20 to device_blocks=100"),
        ("exclusive", 100, 4, "host_blocks=4 add less than 1/20 to device_blocks=100"),
        ("write_back", 100, 5, ""),
        ("none", 100, 1, ""),  # asked for: the host tier serves swapping alone
    ],
)
def test_sizes_that_make_the_host_tier_useless_are_told(
    policy: str, device: int, host: int, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = config(device_blocks=device, host_blocks=host, tier_policy=policy)
    plan = made.plan()
    assert len(plan.warnings) == bool(what)
    assert what in "".join(plan.warnings)
    assert ("\nwarning   " in str(plan)) == bool(what)
    with caplog.at_level("WARNING", logger="kvmem"), kvmem.Manager(made):
        pass
    assert [record.getMessage() for record in caplog.records] == list(plan.warnings)
