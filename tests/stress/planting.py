"""Mistakes planted from outside into what a stress run works on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvmem
from kvmem.stress import StressOptions, StressReport, run_stress


def stressed(**options: Any) -> StressReport:
    """A short run."""
    options.setdefault("ops", 400)
    return run_stress(StressOptions(**options))


def around(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, other: Callable[..., Any]
) -> None:
    """Replace a method by ``other(original, self, *arguments)``, but not for warming up, which is
    done before."""
    stressed(ops=20)
    monkeypatch.setattr("kvmem.stress.run.warmup", lambda _: None)
    original = getattr(owner, name)

    def replaced(self: Any, *arguments: Any, **options: Any) -> Any:
        return other(original, self, *arguments, **options)

    monkeypatch.setattr(owner, name, replaced)


class FlippedBytes:
    """Flips one byte in the host arena of each sequence that has been swapped out, and notes it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.planted: dict[int, int] = {}  # sequence id -> position
        around(monkeypatch, kvmem.Manager, "swap_out", self._swap_out)
        around(monkeypatch, kvmem.Manager, "fork", self._fork)
        self.planted.clear()  # of warming up

    def _swap_out(self, original: Any, m: kvmem.Manager, seqs: Any, how: str = "swap") -> Any:
        transfer = original(m, seqs, how)
        transfer.wait(30)
        m.evict(10**6)  # else the device frames would be used again, and nothing be copied in
        for seq in seqs:
            if seq.id not in self.planted and seq.state == "SWAPPED":
                self._flip(m, seq)
        return transfer

    def _flip(self, m: kvmem.Manager, seq: kvmem.Sequence) -> None:
        """In the last block, if it is nobody else's: so only this sequence can find it."""
        size = m.config.block_size
        last = len(seq.block_ids) - 1
        if last < 0 or seq.num_computed % size == 0:
            return
        block = m.block(seq.block_ids[last])
        offset = seq.num_computed % size - 1
        if block.ref_count > 1 or block.device != "host" or block.num_valid_tokens <= offset:
            return
        key, _ = block.host_data(m.config.num_layers - 1)
        row = key[offset, -1].view(torch.uint8)
        row[1] ^= 1  # low bits of a number: attention can't notice it
        self.planted[seq.id] = last * size + offset

    def _fork(self, original: Any, m: kvmem.Manager, seq: kvmem.Sequence, n: int = 1) -> Any:
        children = original(m, seq, n)
        if seq.id in self.planted:
            self.planted |= {child.id: self.planted[seq.id] for child in children}
        return children
