"""What K and V are computed in and stored as, and the scales that go with fp8_e4m3.

Numbers of fp8_e4m3 have three bits of mantissa and end at 448, so each K/V head of a layer has a
scale: stored is k / k_scale, read is that times k_scale. Scales belong to the bytes of every block,
cached and swapped ones too: they are part of the Config, and never change.
"""

from __future__ import annotations

import numpy as np
import torch

from kvmem.checks import nearest, shown
from kvmem.errors import ConfigError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FP8 = torch.float8_e4m3fn
FP8_NAME = "fp8_e4m3"
_PLANNED = ("float8_e4m3fn", "float8_e5m2", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "nvfp4")

MIN_SCALE, MAX_SCALE = 1e-12, 1e12

#: A number for each K/V head of each layer.
Scales = tuple[tuple[float, ...], ...]


def storage_name(dtype: torch.dtype) -> str:
    """The name of what K and V are stored as: "fp8_e4m3", or torch's own without "torch."."""
    return FP8_NAME if dtype == FP8 else str(dtype).removeprefix("torch.")


def checked_dtype(value: object) -> torch.dtype:
    """What is computed in. Raises ConfigError, TypeError."""
    listed = ", ".join(DTYPES)
    if not isinstance(value, (str, torch.dtype)):
        raise TypeError(f"dtype must be a torch dtype or its name ({listed}), not {shown(value)}")
    name = str(value).removeprefix("torch.")
    if name in DTYPES:
        return DTYPES[name]
    if name in _PLANNED or name.startswith("float8"):
        raise ConfigError(
            f"dtype={shown(name)} is not in this version; supported: {listed}; K and V alone can "
            f"be stored as kv_dtype={FP8_NAME!r}"
        )
    raise ConfigError(
        f"dtype={shown(name)} cannot be stored; supported: {listed}{nearest(name, DTYPES)}"
    )


def checked_kv_dtype(value: object, dtype: torch.dtype) -> torch.dtype:
    """What K and V are stored as; None: ``dtype``. Raises ConfigError, TypeError."""
    if value is None:
        return dtype
    listed = f"None (dtype, here {storage_name(dtype)}), {FP8_NAME!r}"
    if not isinstance(value, (str, torch.dtype)):
        raise TypeError(
            f"kv_dtype must be a dtype, its name or None ({listed}), not {shown(value)}"
        )
    name = str(value).removeprefix("torch.")
    if name in (FP8_NAME, storage_name(dtype), "float8_e4m3fn"):
        return dtype if name == storage_name(dtype) else FP8
    if name in DTYPES or name in _PLANNED or name.startswith("float8"):
        raise ConfigError(f"kv_dtype={shown(name)} is not in this version; supported: {listed}")
    raise ConfigError(
        f"kv_dtype={shown(name)} is unknown; supported: {listed}{nearest(name, [FP8_NAME])}"
    )


def checked_scales(
    name: str, value: object, kv_dtype: torch.dtype, num_layers: int, num_kv_heads: int
) -> Scales | None:
    """The scales of all layers as float32 numbers; None without fp8_e4m3, which has none.

    ``value`` is a number, or numbers that broadcast to ``[num_layers, num_kv_heads]``. Raises
    ConfigError, TypeError.
    """
    if kv_dtype != FP8:
        if value is not None:
            raise ConfigError(
                f"{name} needs kv_dtype={FP8_NAME!r}: K and V are stored as "
                f"{storage_name(kv_dtype)}, which has no scale"
            )
        return None
    shape = (num_layers, num_kv_heads)
    allowed = f"a number {MIN_SCALE} to {MAX_SCALE}, or such numbers that broadcast to {shape}"
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().to(torch.float32).numpy()
    try:
        numbers = np.asarray(1.0 if value is None else value)
        if numbers.dtype.kind not in "iuf":
            raise TypeError
        scales = np.broadcast_to(numbers.astype(np.float32), shape)
    except TypeError:
        raise TypeError(f"{name} must be {allowed}, not {shown(value)}") from None
    except ValueError:
        raise ConfigError(f"{name} is {shown(value)}; expected {allowed}") from None
    wrong = np.argwhere(~((scales >= MIN_SCALE) & (scales <= MAX_SCALE)))
    if len(wrong):
        layer, head = wrong[0].tolist()
        raise ConfigError(
            f"{name} of layer {layer}, K/V head {head} is {float(scales[layer, head])!r}; "
            f"expected {allowed}"
        )
    return tuple(tuple(row) for row in scales.tolist())
