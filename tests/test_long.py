"""Long sequences: 1 M tokens work, tables grow with use, metadata stays within 96 bytes a block."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvmem
from kvmem.ledger.state import metadata_bytes_per_block
from tests.driver import Driver, tokens_of

MILLION = 1 << 20
THIN = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "debug": False}
CHUNK = 1 << 17


def write_positions(step: kvmem.Step) -> None:
    """K is 0, so attention is the mean of V; V is the position, exact in float32."""
    value = step.positions.to(torch.float32)[:, None, None]
    step.write(0, torch.zeros_like(value), value)


def mean_of_positions(d: Driver, seq: kvmem.Sequence) -> float:
    """Append a token and attend with it over the whole sequence."""
    d.manager.append([seq], [1])
    with d.manager.step([seq]) as step:
        write_positions(step)
        out = step.attend(0, torch.zeros(step.num_tokens, 1, 1))
        assert isinstance(out, torch.Tensor)
    assert step.max_seq_len == seq.num_tokens
    return float(out[-1])


@pytest.mark.parametrize("block_size", [64, 1024])
def test_a_million_tokens(block_size: int) -> None:
    blocks = MILLION // block_size + 2
    sizes = {"block_size": block_size, "device_blocks": blocks, "host_blocks": blocks}
    with Driver(**THIN, **sizes) as d:
        m = d.manager
        tokens = np.arange(MILLION, dtype=np.int32) % 50_000
        seq = d.create(tokens)
        assert m.can_fit(seqs=[seq]) == "yes"
        while seq.num_computed < MILLION:
            with m.step([seq], max_tokens=CHUNK) as step:
                write_positions(step)
        assert len(seq.block_ids) == MILLION // block_size
        assert mean_of_positions(d, seq) == pytest.approx(MILLION / 2, rel=1e-5)
        assert m.match(tokens).num_tokens == MILLION
        child = d.fork(seq)[0]
        assert child.num_tokens == MILLION + 1
        m.swap_out([seq, child]).wait(100)
        assert m.evict(1 << 30) == blocks - 1
        m.swap_in([seq]).wait(100)
        assert mean_of_positions(d, seq) == pytest.approx((MILLION + 1) / 2, rel=1e-5)
        m.truncate([seq, child], MILLION // 2)
        assert mean_of_positions(d, seq) == pytest.approx(MILLION / 4, rel=1e-5)
        d.free(child, seq)
        again = d.create(tokens)  # a hit as long as what is still cached
        assert again.num_cached >= MILLION // 2


def test_tables_grow_with_use() -> None:
    with Driver(**THIN, device_blocks=4096, host_blocks=0, block_size=16) as d:
        assert d.state.table.nbytes + d.state.tokens.nbytes < 1 << 16  # not max length x max seqs
        for i in range(1000):
            d.create(tokens_of(10, i))
        assert d.state.tokens.nbytes < 1000 * 10 * 4 * 8
        assert d.state.table.nbytes < 1 << 16
        assert len(d.state.sequences) < 4096
        long = d.create(tokens_of(60_000))
        with d.manager.step([long]) as step:
            write_positions(step)
        assert d.state.table.nbytes < 60_000 // 16 * 4 * 8
        assert d.state.tokens.nbytes < (60_000 + 16_000) * 4 * 8


def test_memory_of_ended_sequences_is_used_again() -> None:
    with Driver(**THIN, device_blocks=256, host_blocks=0, block_size=16) as d:
        sizes = []
        for _ in range(30):
            seqs = [d.create(tokens_of(n)) for n in (5, 300, 1200, 77)]
            with d.manager.step(seqs) as step:
                write_positions(step)
            d.manager.append(seqs, [1, 2, 3, 4])
            d.free(*seqs)
            sizes.append((len(d.state.tokens), len(d.state.table), len(d.state.sequences)))
        assert sizes[-1] == sizes[2]


def test_metadata_of_a_block() -> None:
    """Beside its tokens: all records and lists whose length is a number of blocks or frames."""
    assert metadata_bytes_per_block(64) <= 96
    count = 10_000
    with Driver(**THIN, device_blocks=count, host_blocks=count) as d:
        state = d.state
        records = (state.blocks, state.frames, state.nodes, state.node_blocks, state.index)
        assert sum(array.nbytes for array in records) / (2 * count) <= 96
        lists = (state.out_list, state.in_list, state.copy_list, state.fill_list)
        total = sum(array.nbytes for array in (*records, *lists)) / (2 * count)
        assert total <= 140, f"{total} bytes a block with the scratch of the largest plan"
        planned = d.config.plan().metadata_bytes
        held = sum(np.asarray(array).nbytes for array in state)
        assert held == pytest.approx(planned, rel=0.3)
