"""The spec of `write_kv`: byte-exact reference and input maker."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_kernels.dtypes import any_storage_dtype, bits_to_float, float_to_bits, nan_pattern
from cuda_kernels.spec import Spec


def reference(arguments: dict[str, Any]) -> NDArray[Any]:
    """What the arena holds afterwards, slot by slot."""
    a = arguments
    arena: NDArray[Any] = a["arena"].copy()
    head_major = a.get("layout", "HND") == "HND"
    key, value = stored_rows(a, "key"), stored_rows(a, "value")
    for token, slot in enumerate(a["slot_mapping"]):
        if slot < 0:
            continue
        frame, offset = divmod(int(slot), a["block_size"])
        for rows, plane in ((key, a["key_offset"]), (value, a["value_offset"])):
            for head in range(a["num_kv_heads"]):
                row = head * a["block_size"] + offset
                if not head_major:
                    row = offset * a["num_kv_heads"] + head
                start = plane + row * rows.shape[2]
                arena[frame, start : start + rows.shape[2]] = rows[token, head]
    return arena


def stored_rows(a: dict[str, Any], name: str) -> NDArray[Any]:
    """Rows as they are stored: as they are, or divided by the scales and rounded to fp8_e4m3."""
    rows: NDArray[Any] = a[name]
    if a.get("kv_dtype") is None:
        return rows
    scale = a.get(f"{name}_scale")
    widened = bits_to_float(rows, a["dtype"])
    return float_to_bits(widened if scale is None else widened / scale[:, None], a["kv_dtype"])


def make_inputs(
    rng: np.random.Generator,
    *,
    dtype: str,
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    block_size: int,
    skipped: float = 0.2,
    layout: str = "HND",
    kv_dtype: str | None = None,
) -> dict[str, Any]:
    """Draw arguments of `write_kv`: distinct slots in random order, some -1; the arena is NaN.

    With "fp8_e4m3" also scales, and numbers of all sizes, NaN and infinity among them.
    """
    num_frames = num_tokens // block_size + 3
    key_size = num_kv_heads * block_size * head_dim
    elements = key_size + num_kv_heads * block_size * value_dim + 5
    slots = rng.permutation(num_frames * block_size)[:num_tokens].astype(np.int64)
    slots[rng.random(num_tokens) < skipped] = -1
    storage = any_storage_dtype(kv_dtype or dtype)
    poison = nan_pattern(storage.name).view(storage.array_dtype)
    rows = [rng.standard_normal((num_tokens, num_kv_heads, n)) for n in (head_dim, value_dim)]
    scales: dict[str, Any] = {}
    if kv_dtype is not None:
        for numbers in rows:
            numbers *= 2.0 ** rng.uniform(-14, 11, numbers.shape)
            special = rng.random(numbers.shape) < 0.02
            numbers[special] = rng.choice([np.nan, np.inf, -np.inf, -0.0], int(special.sum()))
        drawn = rng.uniform(0.1, 4, (2, num_kv_heads)).astype(np.float32)
        scales = dict(zip(("key_scale", "value_scale"), drawn, strict=True))
    return {
        "arena": np.full((num_frames, elements), poison),
        "key": float_to_bits(rows[0], dtype),
        "value": float_to_bits(rows[1], dtype),
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        **scales,
        "key_offset": 2,
        "value_offset": 2 + key_size + 3,
        "block_size": block_size,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "value_dim": value_dim,
        "layout": layout,
        "slot_mapping": slots,
    }


SPEC = Spec(
    name="write_kv",
    axes={
        "num_tokens": "rows to store",
        "num_kv_heads": "heads of K and V",
        "head_dim": "width of k, any",
        "value_dim": "width of v, any",
        "block_size": "slots of a frame, any",
    },
    tensors={
        "arena": "[frames, frame_elements], storage dtype",
        "key": "[num_tokens, num_kv_heads, head_dim], storage dtype",
        "value": "[num_tokens, num_kv_heads, value_dim], storage dtype",
        "slot_mapping": "[num_tokens], int32 or int64; frame * block_size + offset, -1 skips",
    },
    tolerance={"float32": 0, "float16": 0, "bfloat16": 0},
    relative_to="bits",
    reference=reference,
    make_inputs=make_inputs,
)
