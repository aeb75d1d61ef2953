"""``kvmem plan`` against arithmetic done by hand for known models, and against the Manager."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import kvmem
from kvmem import capacity as capacities
from kvmem.model_shapes import KNOWN_TYPES, model_shape, read_hf_config, uniform_model
from tests.cli import models
from tests.cli.commands import run

MODEL = ["--layers", "30", "--kv-heads", "3", "--head-dim", "64"]

# Bytes a token by hand: layers x heads x (K + V) x bytes of an element.
TOKEN_BYTES = [
    (models.LLAMA_31_8B, 131072),  # 32 x 8 x 256 x 2
    (models.QWEN_25_7B, 57344),  # 28 x 4 x 256 x 2
    (models.MISTRAL_7B_V01, 131072),  # 32 x 8 x 256 x 2
    (models.GEMMA_2_9B, 688128),  # 42 x 8 x 512 x 4 (float32)
    (models.GEMMA_3_27B, 507904),  # 62 x 16 x 256 x 2
    (models.GEMMA_3_4B, 139264),  # 34 x 4 x 512 x 2
    (models.DEEPSEEK_V3, 70272),  # 61 x (512 + 64) x 2
    (models.DEEPSEEK_V2, 69120),  # 60 x (512 + 64) x 2
]


def write(tmp_path: Path, fields: object) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return str(path)


def plan_of(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    found, out, err = run(capsys, "plan", *words, "--json")
    assert (found, err) == (status, "")
    result: dict[str, Any] = json.loads(out)
    assert result["schema"] == "kvmem.plan/1"
    return result


@pytest.mark.parametrize(("fields", "token_bytes"), TOKEN_BYTES, ids=lambda x: str(x)[:50])
def test_bytes_a_token_of_known_models(
    fields: dict[str, Any], token_bytes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(capsys, "--hf-config", write(tmp_path, fields))
    assert plan["token_bytes"] == token_bytes
    assert plan["block_bytes"] == 64 * token_bytes
    assert sum(group["token_bytes"] for group in plan["groups"]) == token_bytes


def test_llama_on_an_80_gib_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """40 GiB / 128 KiB = 327,680 tokens; frame 0 is reserved, so one block of 64 less."""
    plan = plan_of(
        capsys, "--hf-config", write(tmp_path, models.LLAMA_31_8B), "--device-memory", "40GiB",
        "--host-memory", "160GiB", "--context", "32000", "--sequences", "40", "--bandwidth", "25GB",
    )  # fmt: skip
    assert plan["device_blocks"] == 327_680 // 64 - 1
    assert plan["host_blocks"] == 4 * 327_680 // 64 - 1
    assert plan["device_bytes"] == 40 * 2**30
    assert (plan["sequence_blocks"], plan["lost_tokens"], plan["lost_share"]) == (500, 0, 0)
    assert plan["sequences_on_device"] == 10  # 5119 // 500
    assert plan["sequences_never_stuck"] == 41  # 20479 // 500 + 1
    assert plan["verdict"] == "swapping"
    assert plan["swap_seconds"] == pytest.approx(32000 * 131072 / 25e9)
    assert plan["metadata_bytes"] == (5119 + 20479) * (96 + 4 * 64)
    assert plan["table_bytes"] == 40 * 500 * 4


def test_windows_of_known_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A window of w reaches ceil((w - 1) / 64) blocks back, and the block of the token itself."""
    mistral = plan_of(
        capsys, "--hf-config", write(tmp_path, models.MISTRAL_7B_V01), "--context", "32768"
    )
    assert mistral["sequence_bytes"] == 32768 * 131072
    assert mistral["sequence_windowed_bytes"] == (64 + 1) * 64 * 131072
    assert mistral["manager"] == "supported"
    gemma2 = plan_of(capsys, "--hf-config", write(tmp_path, models.GEMMA_2_9B), "--context", "8192")
    assert [(g["num_layers"], g["window"]) for g in gemma2["groups"]] == [(21, 4096), (21, None)]
    a_layer = 64 * 8 * 512 * 4
    assert gemma2["sequence_windowed_bytes"] == 21 * a_layer * (65 + 128)
    assert gemma2["manager"].startswith("not in this version")
    gemma3 = plan_of(
        capsys, "--hf-config", write(tmp_path, models.GEMMA_3_27B), "--context", "131072"
    )
    assert [(g["num_layers"], g["window"]) for g in gemma3["groups"]] == [(52, 1024), (10, None)]
    silent = plan_of(capsys, "--hf-config", write(tmp_path, models.GEMMA_3_4B))
    assert [(g["num_layers"], g["window"]) for g in silent["groups"]] == [(29, 1024), (5, None)]
    a_layer = 64 * 16 * 256 * 2
    assert gemma3["sequence_windowed_bytes"] == a_layer * (52 * 17 + 10 * 2048)


def test_windows_as_the_classes_read_them() -> None:
    def windows(**fields: object) -> list[int | None]:
        shape = model_shape({**models.QWEN_25_7B, "num_hidden_layers": 4, **fields})
        return [layer.window for layer in shape.layers]

    assert windows() == [None] * 4
    assert windows(use_sliding_window=True, max_window_layers=3, sliding_window=8) == [
        None, None, None, 8,
    ]  # fmt: skip
    kinds = ["full_attention", "sliding_attention"] * 2
    assert windows(use_sliding_window=True, sliding_window=8, layer_types=kinds) == [
        None, 8, None, 8,
    ]  # fmt: skip
    assert windows(use_sliding_window=True, sliding_window=None) == [None] * 4
    mistral = model_shape({**models.MISTRAL_7B_V01, "sliding_window": None})
    assert {layer.window for layer in mistral.layers} == {None}


def test_latent_attention_is_what_the_config_of_kvmem_allocates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(
        capsys, "--hf-config", write(tmp_path, models.DEEPSEEK_V3), "--device-blocks", "10"
    )
    config = kvmem.Config(
        num_layers=61, num_kv_heads=1, head_dim=512, v_head_dim=64, dtype="bfloat16",
        device_blocks=10,
    )  # fmt: skip
    assert plan["device_bytes"] == config.plan().device_bytes == 11 * 64 * 70272
    assert "latent" in plan["notes"][0]


def test_the_plan_is_what_a_manager_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*MODEL, "--device-blocks", "6", "--host-memory", "20MiB", "--block-size", "16"]
    plan = plan_of(capsys, *words, "--dtype", "float16")
    config = kvmem.Config(
        num_layers=30, num_kv_heads=3, head_dim=64, dtype="float16", block_size=16,
        device_blocks=6, host_memory="20MiB",
    )  # fmt: skip
    expected = config.plan().to_dict()
    assert expected.pop("warnings") == ()  # of the tier policy, which the command is not told
    assert {name: plan[name] for name in expected} == expected
    with kvmem.Manager(config) as manager:
        stats = manager.stats()
    assert (stats.device.arena_bytes, stats.host.arena_bytes) == (
        plan["device_bytes"], plan["host_bytes"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sequences", "verdict", "status"),
    [(1, "resident", 0), (2, "resident", 0), (3, "swapping", 0), (6, "swapping", 0),
     (7, "too many", 1)],
)  # fmt: skip
def test_the_verdict_keeps_the_bound(
    capsys: pytest.CaptureFixture[str], sequences: int, verdict: str, status: int
) -> None:
    """4 blocks a sequence; 9 on the device and 20 on the host: 2 resident, 20 // 4 + 1 = 6 live."""
    words = [*MODEL, "--device-blocks", "9", "--host-blocks", "20", "--context", "250"]
    plan = plan_of(capsys, *words, "--sequences", str(sequences), status=status)
    assert plan["verdict"] == verdict
    config = kvmem.Config(
        num_layers=30, num_kv_heads=3, head_dim=64, device_blocks=9, host_blocks=20
    )
    promised = config.plan().never_stuck([250] * sequences)
    assert promised == (verdict != "too many")


def test_a_context_longer_than_the_device_never_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*MODEL, "--device-blocks", "2", "--context", "129", "--sequences", "1"]
    assert plan_of(capsys, *words, status=1)["verdict"] == "never"
    status, out, _ = run(capsys, "plan", *words)
    assert status == 1
    assert "raise --device-memory" in out


def test_a_context_beyond_the_model_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, models.GEMMA_2_9B)
    assert plan_of(capsys, "--hf-config", path, "--context", "8192")["notes"] == []
    notes = plan_of(capsys, "--hf-config", path, "--context", "8193")["notes"]
    assert notes == ["the model was made for at most 8192 positions"]


def test_lost_share_is_that_of_the_last_block(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(capsys, *MODEL, "--context", "100", "--block-size", "64")
    assert (plan["lost_tokens"], plan["lost_share"]) == (28, 28 / 128)
    size, context = 16, 1000
    mean = sum(i / (context + i) for i in range(size)) / size
    plan = plan_of(capsys, *MODEL, "--context", str(context), "--block-size", str(size))
    assert plan["lost_share_mean"] == pytest.approx(mean, rel=0.01)


def test_a_measured_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--layers", "2", "--kv-heads", "2", "--head-dim", "64", "--context", "64"]
    plan = plan_of(capsys, *words, "--measure")
    assert 10**7 < plan["bandwidth"] < 10**12
    assert plan["swap_seconds"] == pytest.approx(plan["sequence_bytes"] / plan["bandwidth"])


def test_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    folder = tmp_path / "model"
    write(folder, models.GEMMA_2_9B)
    status, out, err = run(
        capsys, "plan", "--hf-config", str(folder), "--device-memory", "10GiB", "--context", "8192",
        "--dtype", "bfloat16",
    )  # fmt: skip
    assert (status, err) == (0, "")
    for part in ("gemma2, 42 layers, bfloat16", "336.00 KiB of K and V", "window 4096",
                 "not in this version", "blocks behind a window", "--bandwidth SIZE"):  # fmt: skip
        assert part in out


def test_a_capacity_without_tiers_says_why() -> None:
    found = capacities.capacity(uniform_model(2, 1, 8, 8), dtype="float16", block_size=16)
    assert (found.bound, found.sequence_blocks, found.swap_seconds) == (None, None, None)
    assert set(found.reasons) == {"context", "device_blocks", "swap_seconds"}


# --- files that are no such config ----------------------------------------------------------------

WITHOUT = {key: value for key, value in models.LLAMA_31_8B.items() if key != "hidden_size"}
BAD_FIELDS: list[tuple[object, str]] = [
    ([1, 2], "holds a list"),
    ({}, "lacks model_type.*num_hidden_layers"),
    ({"model_type": "mamba", "num_hidden_layers": 4}, "'mamba'.*not known.*num_attention_heads"),
    ({**models.LLAMA_31_8B, "model_type": "lama"}, "did you mean 'llama'"),
    ({**models.LLAMA_31_8B, "model_type": "qwen3_next"}, "'qwen3_next' stores .* is not known"),
    ({**models.LLAMA_31_8B, "model_type": 7}, "7"),
    ({"model_type": "llama"}, "lacks num_hidden_layers, num_attention_heads"),
    (WITHOUT, "lacks hidden_size"),
    ({"model_type": "qwen2", "num_hidden_layers": 2, "num_attention_heads": 4},
     "lacks num_key_value_heads"),
    ({"model_type": "deepseek_v3", "num_hidden_layers": 2}, "lacks kv_lora_rank, qk_rope_head_dim"),
    ({**models.LLAMA_31_8B, "num_hidden_layers": 0}, "num_hidden_layers is 0; allowed"),
    ({**models.LLAMA_31_8B, "num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
    ({**models.LLAMA_31_8B, "num_hidden_layers": True}, "num_hidden_layers is True"),
    ({**models.LLAMA_31_8B, "num_hidden_layers": 10**6}, "num_hidden_layers is 1000000; allowed"),
    ({**models.LLAMA_31_8B, "num_key_value_heads": 5}, "no multiple of num_key_value_heads=5"),
    ({**models.LLAMA_31_8B, "num_key_value_heads": 1.5}, "num_key_value_heads is 1.5"),
    ({**models.LLAMA_31_8B, "hidden_size": 4097}, "hidden_size=4097 is no multiple"),
    ({**models.LLAMA_31_8B, "head_dim": -1}, "head_dim is -1"),
    ({**models.GEMMA_2_9B, "layer_types": ["full_attention"]}, "layer_types must list 42 layers"),
    ({**models.GEMMA_2_9B, "layer_types": ["linear_attention"] * 42}, "linear_attention"),
    ({**models.MISTRAL_7B_V01, "sliding_window": 0}, "sliding_window is 0"),
    ({"model_type": "gemma3", "text_config": {"num_hidden_layers": -1}}, "num_hidden_layers is -1"),
    ({"model_type": "gemma3"}, "lacks|not known"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS, ids=lambda x: str(x)[-40:])
def test_bad_fields(
    fields: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_refused(capsys, write(tmp_path, fields), message)


BAD_BYTES = [
    (b"", "no JSON"),
    (b"{", r"config.json':1:2 is no JSON"),
    (b'{"model_type": "llama",}', ":1:24"),
    ("{}".encode("utf-16"), "not UTF-8"),
    (b"\xff\x00", "not UTF-8"),
    (b"[" * 200_000, "nested too deep|no JSON"),
    (b"NaN", "holds a str"),
    (b'"' + b"x" * (17 << 20) + b'"', "larger than"),
]


@pytest.mark.parametrize(("raw", "message"), BAD_BYTES, ids=lambda x: str(x)[:20])
def test_bad_bytes(
    raw: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    check_refused(capsys, str(path), message)


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(capsys, str(tmp_path / "none.json"), "No such file")
    check_refused(capsys, str(tmp_path), "No such file")  # a folder without config.json
    check_refused(capsys, "bad\0name", "null")


def check_refused(capsys: pytest.CaptureFixture[str], path: str, message: str) -> None:
    status, out, err = run(capsys, "plan", "--hf-config", path)
    assert (status, out) == (3, "")
    assert re.search(message, err), err
    assert err.count("\n") == 1
    assert len(err) <= 308


def test_known_types_are_all_read() -> None:
    """Every type that is named as known can be read from a complete file."""
    complete = {**models.DEEPSEEK_V3, "hidden_size": 4096, "num_attention_heads": 32,
                "num_key_value_heads": 8, "sliding_window": 64}  # fmt: skip
    for name in KNOWN_TYPES:
        shape = model_shape({**complete, "model_type": name, "text_config": complete | {
            "model_type": "gemma3_text" if name == "gemma3" else "mistral"}})  # fmt: skip
        assert len(shape.layers) == 61


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(models.LLAMA_31_8B).encode())
    assert read_hf_config(path).model_type == "llama"
