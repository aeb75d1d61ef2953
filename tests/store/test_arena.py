"""Arenas: exact, aligned, zeroed, shared by their views, given back."""

from __future__ import annotations

import os

import numpy as np
import psutil
import pytest
import torch

from kvmem.errors import ConfigError, ManagerClosed
from kvmem.store.arena import Arena


def test_memory_is_exact_aligned_and_zero() -> None:
    arena = Arena("device", 5, 192)
    assert arena.num_bytes == arena.bytes.nbytes == 5 * 192
    assert arena.bytes.ctypes.data % 64 == 0
    assert not arena.bytes.any()
    arena.close()


def test_all_views_share_the_memory() -> None:
    arena = Arena("device", 3, 128)
    arena.typed(torch.bfloat16)[1, 0] = 1.0
    assert arena.tensor.shape == (3, 128)
    assert arena.elements(np.dtype(np.uint16))[1, 0] == 0x3F80
    assert bytes(arena.bytes[1, :2]) == b"\x80\x3f"
    arena.close()


def test_a_big_arena_costs_nothing_until_it_is_written() -> None:
    before = psutil.Process().memory_info().rss
    arena = Arena("host", 1 << 17, 1 << 14)  # 2 GiB of addresses
    arena.bytes[-1, -1] = 1
    assert psutil.Process().memory_info().rss - before < 64 << 20
    arena.close()


def test_close_gives_memory_back_though_a_view_lives_on() -> None:
    arena = Arena("host", 64, 1 << 20)
    arena.bytes[:] = 7
    view = arena.tensor
    before = psutil.Process().memory_info().rss
    arena.close()
    assert before - psutil.Process().memory_info().rss > 32 << 20
    assert not view[3].any()
    assert arena.closed
    with pytest.raises(ManagerClosed, match="host arena is closed"):
        _ = arena.bytes
    arena.close()


def test_a_refused_mapping_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"host arena: \d+ frames of 64 bytes.*fewer blocks"):
        Arena("host", 1 << 56, 64)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_writes_to_its_own_pages() -> None:
    arena = Arena("device", 1, 64)
    child = os.fork()
    if child == 0:
        arena.bytes[:] = 1
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not arena.bytes.any()
    arena.close()
