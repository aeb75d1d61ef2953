"""What a model stores a token, read from the ``config.json`` of a Hugging Face model. Offline.

Only model types whose cache is known are read: guessing from field names would be wrong without a
sign (a hybrid of attention and linear layers has the fields of plain attention, too). What is
stored a layer and token::

    plain attention   num_kv_heads keys of head_dim and as many values
    latent (MLA)      one key of kv_lora_rank (the latent) and one value of qk_rope_head_dim
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmem.checks import nearest, shown
from kvmem.errors import FormatError
from kvmem.geometry import LayerGeometry

MAX_FILE_BYTES = 16 << 20  # a config.json has some kilobytes
MAX_FIELD = 2**31 - 1
_PATH_SHOWN = 80  # characters, the last ones, so that a message stays within 300

#: Model types with plain attention in each layer. Value: whether a field ``sliding_window`` alone
#: (without ``use_sliding_window`` or ``layer_types``) means that all layers have it.
_PLAIN = {
    "llama": False, "mistral": True, "mixtral": True, "phi3": True, "gemma": False,
    "qwen2": False, "qwen2_moe": False, "qwen3": False, "qwen3_moe": False,
    "olmo2": False, "granite": False,
}  # fmt: skip
#: Of these, the types whose class takes as many key heads as query heads where the file is silent.
_HEADS_DEFAULT = ("llama", "phi3", "gemma", "olmo2", "granite")
#: Model types that mix windowed and full layers; value: each how many-th layer is a full one.
_ALTERNATING = {"gemma2": 2, "gemma3_text": 6}
_LATENT = ("deepseek_v2", "deepseek_v3")
#: Model types around one of the above, in their field ``text_config``.
_WRAPPED = {"gemma3": "gemma3_text", "mistral3": "mistral"}

#: What the published files of a type leave out, because it is the default of its class.
_DEFAULTS: dict[str, dict[str, int]] = {
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "sliding_window": 4096, "num_hidden_layers": 26,
    },
    "gemma2": {"sliding_window": 4096},
}  # fmt: skip

KNOWN_TYPES = tuple(sorted([*_PLAIN, *_ALTERNATING, *_LATENT, *_WRAPPED]))

_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer: what it stores for a token, and how many positions it looks back on."""

    stored: LayerGeometry
    window: int | None = None  # last positions seen, the own included; None: all


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The layers of a model, and what the file says beside them."""

    model_type: str
    layers: tuple[LayerShape, ...]
    dtype: str | None = None  # float32, float16, bfloat16; None: the file does not say
    max_context: int | None = None  # positions the model was made for
    notes: tuple[str, ...] = ()

    @property
    def is_uniform(self) -> bool:
        """Whether all layers are equal, as this version's Config asks."""
        return len(set(self.layers)) == 1


def uniform_model(
    num_layers: int, num_kv_heads: int, head_dim: int, value_dim: int, window: int | None = None
) -> ModelShape:
    """The shape of ``num_layers`` equal layers."""
    layer = LayerShape(LayerGeometry(num_kv_heads, head_dim, value_dim), window)
    return ModelShape("given by flags", (layer,) * num_layers)


def read_hf_config(path: str | Path) -> ModelShape:
    """The shape of the model whose ``config.json`` (or folder with one) is at ``path``.

    Raises OSError when it can't be read, FormatError when it is not such a file, or of a model
    type whose cache is not known; the message then lists the missing fields.
    """
    place = Path(path)
    if place.is_dir():
        place = place / "config.json"
    with place.open("rb") as file:
        raw = file.read(MAX_FILE_BYTES + 1)
    text = str(place)
    name = repr(text if len(text) <= _PATH_SHOWN else "..." + text[-_PATH_SHOWN:])
    if len(raw) > MAX_FILE_BYTES:
        raise FormatError(f"{name} is larger than {MAX_FILE_BYTES} bytes: no config.json")
    try:
        fields = json.loads(raw.decode("utf-8-sig"), parse_constant=lambda text: text)
    except UnicodeDecodeError as error:
        raise FormatError(f"{name} is not UTF-8 (byte {error.start}): no config.json") from None
    except json.JSONDecodeError as error:
        raise FormatError(
            f"{name}:{error.lineno}:{error.colno} is no JSON: {error.msg}; give a config.json"
        ) from None
    except RecursionError:
        raise FormatError(f"{name} is nested too deep: no config.json") from None
    return model_shape(fields, source=name)


def model_shape(fields: object, *, source: str = "config") -> ModelShape:
    """The shape that the fields of a ``config.json`` describe. Raises FormatError."""
    if not isinstance(fields, Mapping):
        raise FormatError(f"{source} holds a {type(fields).__name__}, a config.json an object")
    model_type = fields.get("model_type")
    if model_type in _WRAPPED and isinstance(fields.get("text_config"), Mapping):
        inner = {"model_type": _WRAPPED[model_type], **fields["text_config"]}
        if "torch_dtype" not in inner and "dtype" not in inner:
            inner["dtype"] = fields.get("dtype", fields.get("torch_dtype"))
        return model_shape(inner, source=source)
    if not isinstance(model_type, str) or model_type not in KNOWN_TYPES:
        raise FormatError(_unknown(fields, model_type, source))
    reader = _Fields({**_DEFAULTS.get(model_type, {}), **fields}, source)
    if model_type in _LATENT:
        layers, notes = _latent_layers(reader)
    else:
        layers, notes = _attention_layers(reader, model_type)
    return ModelShape(
        model_type, layers, reader.dtype(), reader.optional("max_position_embeddings"), notes
    )


class _Fields:
    """The fields of one file, each checked when it is asked for."""

    def __init__(self, fields: Mapping[str, Any], source: str) -> None:
        self._fields = fields
        self._source = source

    def need(self, *names: str) -> list[int]:
        """Integers >= 1 of these names; all that are missing are named at once."""
        missing = [name for name in names if self._fields.get(name) is None]
        if missing:
            raise FormatError(
                f"{self._source} lacks {', '.join(missing)}: give a complete config.json, or "
                f"--layers, --kv-heads and --head-dim"
            )
        return [self._whole(name, self._fields[name]) for name in names]

    def optional(self, name: str) -> int | None:
        """An integer >= 1, or None where there is none."""
        value = self._fields.get(name)
        return None if value is None else self._whole(name, value)

    def flag(self, name: str) -> bool | None:
        """True, False, or None where there is none."""
        value = self._fields.get(name)
        return value if isinstance(value, bool) else None

    def layer_types(self, count: int) -> list[str] | None:
        """The kind of each layer, where the file lists it."""
        kinds = self._fields.get("layer_types")
        if kinds is None:
            return None
        known = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != count:
            raise FormatError(f"{self._source}: layer_types must list {count} layers")
        for index, kind in enumerate(kinds):
            if kind not in known:
                raise FormatError(
                    f"{self._source}: layer_types[{index}] is {shown(kind)}; known: "
                    f"{', '.join(known)}: the size of another layer's state can't be computed"
                )
        return kinds

    def dtype(self) -> str | None:
        """The name of a dtype that can be stored, or None."""
        value = self._fields.get("dtype", self._fields.get("torch_dtype"))
        name = str(value).removeprefix("torch.")
        return name if name in _DTYPES else None

    def fail(self, message: str) -> FormatError:
        """An error about this file."""
        return FormatError(f"{self._source}: {message}")

    def _whole(self, name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_FIELD:
            raise FormatError(
                f"{self._source}: {name} is {shown(value)}; allowed: an integer 1 to {MAX_FIELD}"
            )
        return value


def _attention_layers(
    reader: _Fields, model_type: str
) -> tuple[tuple[LayerShape, ...], tuple[str, ...]]:
    """Layers with keys and values of each head, and their windows."""
    num_layers, num_heads = reader.need("num_hidden_layers", "num_attention_heads")
    if num_layers > 4096:
        raise reader.fail(f"num_hidden_layers is {num_layers}; allowed: 1 to 4096")
    if model_type in _HEADS_DEFAULT:
        num_kv_heads = reader.optional("num_key_value_heads") or num_heads
    else:
        (num_kv_heads,) = reader.need("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise reader.fail(
            f"num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}"
        )
    head_dim = reader.optional("head_dim")
    if head_dim is None:
        (hidden,) = reader.need("hidden_size")
        if hidden % num_heads:
            raise reader.fail(
                f"head_dim is missing, and hidden_size={hidden} is no multiple of "
                f"num_attention_heads={num_heads}"
            )
        head_dim = hidden // num_heads
    stored = LayerGeometry(num_kv_heads, head_dim, head_dim)
    windows = _windows(reader, model_type, num_layers)
    return tuple(LayerShape(stored, window) for window in windows), ()


def _windows(reader: _Fields, model_type: str, num_layers: int) -> list[int | None]:
    """The window of each layer, as the model's class reads its file."""
    if reader.flag("use_sliding_window") is False:
        return [None] * num_layers
    window = None
    if model_type in _ALTERNATING or model_type.startswith(("qwen", "mistral", "mixtral", "phi3")):
        window = reader.optional("sliding_window")
    if window is None:
        return [None] * num_layers
    kinds = reader.layer_types(num_layers)
    if kinds is not None:
        return [window if kind == "sliding_attention" else None for kind in kinds]
    if model_type in _ALTERNATING:
        every = reader.optional("sliding_window_pattern") or _ALTERNATING[model_type]
        return [None if (index + 1) % every == 0 else window for index in range(num_layers)]
    if _PLAIN[model_type]:
        return [window] * num_layers
    if reader.flag("use_sliding_window") is None:  # the default of these classes is False
        return [None] * num_layers
    first = reader.optional("max_window_layers") or 0
    return [window if index >= first else None for index in range(num_layers)]


def _latent_layers(reader: _Fields) -> tuple[tuple[LayerShape, ...], tuple[str, ...]]:
    """Multi-head latent attention: one latent and one rotated key a token, whatever the heads."""
    num_layers, rank, rope = reader.need("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim")
    if num_layers > 4096:
        raise reader.fail(f"num_hidden_layers is {num_layers}; allowed: 1 to 4096")
    note = (
        "latent attention: the latent is stored as K and the rotated part as V of one head; "
        "Step.attend does not compute it, a kernel of your own over Manager.kv does"
    )
    return (LayerShape(LayerGeometry(1, rank, rope)),) * num_layers, (note,)


def _unknown(fields: Mapping[str, Any], model_type: object, source: str) -> str:
    """The refusal of a model type, with what is missing to compute by hand."""
    needed = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    missing = [name for name in needed if fields.get(name) is None]
    lacks = f"; the file also lacks {', '.join(missing)}" if missing else ""
    if model_type is None:
        return f"{source} lacks model_type{lacks}: no config.json of a model"
    close = nearest(str(model_type), KNOWN_TYPES)
    return (
        f"{source}: what model_type {shown(model_type)} stores a token is not known{close}{lacks}; "
        f"give --layers, --kv-heads and --head-dim instead"
    )
