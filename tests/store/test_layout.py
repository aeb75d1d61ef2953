"""The layout against index arithmetic written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvmem.errors import ConfigError
from kvmem.store.layout import Layout
from tests.store.fakes import FakeConfig

SHAPES = [
    # layers, kv heads, head_dim, value_dim, block_size, dtype
    (1, 1, 1, 1, 1, "float32"),
    (2, 3, 64, 64, 16, "float32"),
    (3, 1, 80, 96, 1, "bfloat16"),
    (2, 2, 7, 5, 2, "float16"),  # planes that need padding
    (30, 3, 64, 64, 64, "bfloat16"),
]


def build(shape: tuple[int, int, int, int, int, str]) -> Layout:
    names = ("num_layers", "num_kv_heads", "head_dim", "value_dim", "block_size", "dtype_name")
    return Layout.build(**dict(zip(names, shape, strict=True)))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", SHAPES)
def test_planes_are_disjoint_aligned_and_inside_the_frame(shape: tuple) -> None:
    layout = build(shape)
    owner = np.zeros(layout.frame_elements, np.int32)
    for offset, rows, width in zip(*layout.rows(), strict=True):
        size = rows * layout.block_size * width
        assert offset * layout.storage_dtype.itemsize % 64 == 0
        assert offset + size <= layout.frame_elements
        owner[offset : offset + size] += 1
    assert owner.max() == 1
    filled = int(owner.sum()) * layout.storage_dtype.itemsize
    assert filled == layout.token_bytes * layout.block_size
    assert layout.frame_bytes % 64 == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_views_point_at_each_element_of_the_plane(shape: tuple) -> None:
    layout = build(shape)
    frames = 3
    # Numbers that name their own place; int views, so that no float rounding hides one.
    integer = {4: torch.int32, 2: torch.int16}[layout.storage_dtype.itemsize]
    flat = torch.arange(frames * layout.frame_elements, dtype=torch.int64).to(integer)
    typed = flat.view(frames, layout.frame_elements)
    _, heads, head_dim, value_dim, block_size, _ = shape
    for layer in range(layout.num_layers):
        views = layout.views(typed, layer)
        for view, offset, width in zip(
            views, layout.layers[layer], (head_dim, value_dim), strict=True
        ):
            assert view.shape == (frames, block_size, heads, width)
            f, t, h, d = np.ix_(*(range(n) for n in view.shape))
            place = f * layout.frame_elements + offset + (h * block_size + t) * width + d
            assert np.array_equal(view.numpy(), place.astype(view.numpy().dtype))
            assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_layout_of_a_config() -> None:
    layout = Layout.of(FakeConfig(head_dim=8, v_head_dim=6, dtype=torch.bfloat16))
    assert (layout.head_dim, layout.value_dim, layout.dtype_name) == (8, 6, "bfloat16")
    assert layout.dtype is torch.bfloat16


def test_a_dtype_that_cant_be_stored() -> None:
    with pytest.raises(ConfigError, match=r"float64.*supported: float32, float16, bfloat16"):
        Layout.of(FakeConfig(dtype=torch.float64))
