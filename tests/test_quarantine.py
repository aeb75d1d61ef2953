"""Quarantine of freed frames under debug=True: who still writes to one is found out (R11, R12)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvmem
from kvmem.ledger.verify import LedgerCorrupt


def made(**options: object) -> kvmem.Manager:
    return kvmem.Manager(
        kvmem.Config(
            num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_size=4,
            device_blocks=6, host_blocks=4, **options,  # type: ignore[arg-type]
        )
    )  # fmt: skip


def filled(m: kvmem.Manager, tokens: range) -> tuple[kvmem.Sequence, list[int]]:
    """A computed sequence outside the cache, and its device frames."""
    seq = m.create(list(tokens), publish=False)
    with m.step([seq]) as step:
        frames = step.block_table[0].tolist()
        kv = np.ones((len(tokens), 1, 8), np.float32)
        step.write(0, torch.from_numpy(kv), torch.from_numpy(kv))
    return seq, frames


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_freed_frame_is_the_last_to_be_used_again(device: str) -> None:
    for debug, expected in ((True, [3, 4]), (False, [1, 2])):
        with made(debug=debug, device=device) as m:
            seq, frames = filled(m, range(8))
            assert frames == [1, 2]
            m.free([seq])
            seq, frames = filled(m, range(8))
            assert frames == expected
            m.free([seq])
            m.verify()


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_late_write_is_found(device: str) -> None:
    with made(debug=True, device=device) as m:
        seq, frames = filled(m, range(8))
        key, _ = m.kv(0)
        m.free([seq])
        other, _ = filled(m, range(100, 108))
        m.swap_out([other]).wait()  # behind the fills, on the same stream
        m.verify()
        old = key[frames[1], 2, 0, 3].clone()
        key[frames[1], 2, 0, 3] = 1.0
        with pytest.raises(LedgerCorrupt, match=r"device frame 2 was written at element 19 while"):
            m.verify()
        key[frames[1], 2, 0, 3] = old
        m.free([other])
        m.verify()
