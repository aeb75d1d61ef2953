"""Tokens that were sampled on the GPU: taken without waiting, right in the next step, published
when they have arrived. A Manager of the CPU does the same work with tokens of the host."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import pytest
import torch

import kvmem
from kvmem.store.cuda.sampled import Sampled
from tests.cuda_double.opening import MODES, Double, install

SETTINGS: dict[str, Any] = {
    "num_layers": 1,
    "num_kv_heads": 1,
    "head_dim": 4,
    "block_size": 4,
    "device_blocks": 24,
    "host_blocks": 24,
}


class Twin:
    """The same work on two Managers: on the double with tokens of the GPU, on the CPU without."""

    def __init__(self, doubles: list[Double], **settings: Any) -> None:
        config = {**SETTINGS, **settings}
        self.gpu = kvmem.Manager(kvmem.Config(device="cuda", **config))
        self.double = doubles[-1]
        self.double.owns_tensors = True
        self.cpu = kvmem.Manager(kvmem.Config(**config))
        self.live: list[tuple[kvmem.Sequence, kvmem.Sequence]] = []
        self._moved = 0  # tokens of the last step

    @property
    def managers(self) -> tuple[kvmem.Manager, kvmem.Manager]:
        return self.gpu, self.cpu

    def create(self, tokens: list[int]) -> None:
        array = np.array(tokens, np.int32)
        self.live.append((self.gpu.create(array), self.cpu.create(array)))

    def step(self, pairs: list[tuple[Any, Any]], *, count: int = 1, **limits: Any) -> None:
        """Steps until each row was ready once; what it samples is appended then. The two may plan
        differently: what is not known yet on the GPU is not found in the trie."""
        for manager, seqs in zip(self.managers, zip(*pairs, strict=True), strict=True):
            todo = list(seqs)
            for _ in range(1000):
                if not todo:
                    break
                before = len(todo)
                self._one(manager, todo, count, limits)
                if len(todo) == before and not self._moved:
                    others = [pair[manager is self.cpu] for pair in self.live]
                    manager.swap_out([seq for seq in others if seq is not todo[0]], how="auto")
            assert not todo

    def _one(self, manager: kvmem.Manager, todo: list[Any], count: int, limits: Any) -> None:
        with manager.step(todo, fit="some", **limits) as step:
            values = step.tokens.to(torch.float32)[:, None, None].expand(-1, 1, 4).contiguous()
            step.write(0, values, values)
            out = step.attend(0, values)[:, 0, 0]
            last = step.last
            base = step.tokens[last] * 31 + step.positions[last] * 7 + out[last].long()
            sampled = (base[:, None] + torch.arange(count)).reshape(-1) % 1000
        self._moved = step.num_tokens
        counts = [count] * len(step.ready)
        if manager is self.cpu:
            manager.append(step.ready, sampled.numpy().astype(np.int32), counts=counts)
        else:
            manager.append(step.ready, sampled, counts=counts)
            sampled.zero_()  # the model's buffer: written again at once
        for seq in step.ready:
            todo.remove(seq)

    def check(self) -> None:
        for gpu, cpu in self.live:
            np.testing.assert_array_equal(gpu.tokens, cpu.tokens)
        for manager in self.managers:
            manager.verify()

    def close(self) -> None:
        for manager in self.managers:
            live = [pair[manager is self.cpu] for pair in self.live]
            manager.free(live)
            manager.close()


@pytest.fixture(params=MODES)
def doubles(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, seed: int
) -> list[Double]:
    return install(monkeypatch, seed, request.param)


def test_decoding_never_waits_for_a_token(
    doubles: list[Double], monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = Twin(doubles)

    def refuse(sampled: Sampled) -> None:
        raise AssertionError("the host waited")

    for i in range(4):
        twin.create([*range(5), 10 + i])
    with monkeypatch.context() as patch:
        patch.setattr(Sampled, "wait", refuse)
        patch.setattr("kvmem.store.cuda.device.CudaDevice.synchronize", refuse)
        before = twin.double.streams.num_host_waits
        for _ in range(12):
            twin.step(twin.live)
        assert twin.double.streams.num_host_waits == before
        assert twin.double.runtime.calls["cudaMemcpyAsync"]
    twin.check()
    twin.gpu.poll()
    assert twin.gpu.stats().blocks_published == twin.cpu.stats().blocks_published
    twin.close()


def test_a_block_is_published_when_its_tokens_have_arrived(doubles: list[Double]) -> None:
    twin = Twin(doubles)
    twin.create([1, 2, 3])
    for _ in range(3):
        twin.step(twin.live)
    (gpu, _), runtime = twin.live[0], twin.gpu._runtime
    known = gpu.tokens  # waits
    assert not runtime.ledger.num_unknown(np.array([gpu._record], np.int32)).any()
    assert twin.gpu.match(known[:4]).num_tokens == 4
    assert twin.gpu.stats().blocks_published == 1
    twin.close()


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
def test_whatever_happens_between_the_tokens_are_those_of_the_cpu(
    doubles: list[Double], seed: int, policy: str
) -> None:
    rng = random.Random(seed)
    twin = Twin(doubles, tier_policy=policy, device_blocks=14, host_blocks=60)
    for _ in range(140):
        long = [pair for pair in twin.live if pair[1].num_tokens > 30]
        for manager, seqs in zip(twin.managers, zip(*long, strict=True), strict=False):
            manager.free(list(seqs))
        twin.live = [pair for pair in twin.live if pair not in long]
        act = rng.random()
        some = rng.sample(twin.live, rng.randint(0, len(twin.live)))
        if act < 0.15 and len(twin.live) < 6:
            twin.create([rng.randrange(4) for _ in range(rng.randint(1, 9))])
        elif act < 0.65 and some:
            limits: dict[str, Any] = {} if rng.random() < 0.6 else {"max_tokens": rng.randint(1, 9)}
            twin.step(some, count=rng.choice((1, 1, 1, 2, 5)), **limits)
        elif act < 0.72 and some:
            for manager, seqs in zip(twin.managers, zip(*some, strict=True), strict=True):
                how = "recompute" if act < 0.68 else "swap"
                manager.swap_out(list(seqs), how=how)
        elif act < 0.77 and some and len(twin.live) < 6:
            gpu, cpu = some[0]
            twin.live += zip(twin.gpu.fork(gpu), twin.cpu.fork(cpu), strict=True)
        elif act < 0.82 and some:
            gpu, cpu = some[0]
            length = rng.randint(1, cpu.num_tokens)
            twin.gpu.truncate([gpu], length)
            twin.cpu.truncate([cpu], length)
            for manager, seq in zip(twin.managers, (gpu, cpu), strict=True):
                manager.append([seq], [7])  # or nothing of it may be pending
        elif act < 0.87 and some:
            tokens = np.array([rng.randrange(4) for _ in some], np.int32)
            for manager, seqs in zip(twin.managers, zip(*some, strict=True), strict=True):
                manager.append(list(seqs), tokens)
        elif act < 0.92 and some:
            for manager, seqs in zip(twin.managers, zip(*some, strict=True), strict=True):
                manager.free(list(seqs))
            twin.live = [pair for pair in twin.live if pair not in some]
        elif act < 0.96:
            twin.gpu.poll()
        else:
            twin.check()
    twin.check()
    twin.close()


def test_a_freed_sequence_learns_nothing(doubles: list[Double]) -> None:
    twin = Twin(doubles)
    twin.create([1, 2, 3])
    twin.step(twin.live)
    (pair,) = twin.live
    for manager, seq in zip(twin.managers, pair, strict=True):
        manager.free([seq])
    twin.live = []
    twin.create([9, 8, 7])  # the same record
    twin.gpu.poll()
    twin.step(twin.live)
    twin.check()
    twin.close()


def test_tokens_that_cannot_be_are_told_and_never_published(
    doubles: list[Double], caplog: pytest.LogCaptureFixture
) -> None:
    twin = Twin(doubles)
    seq = twin.gpu.create(np.array([1, 2, 3], np.int32))
    with twin.gpu.step([seq]) as step:
        zeros = torch.zeros(3, 1, 4)
        step.write(0, zeros, zeros)
    with caplog.at_level(logging.ERROR, "kvmem"):
        twin.gpu.append([seq], torch.tensor([-5]))
        assert seq.tokens.tolist() == [1, 2, 3, 0]
    assert "outside [0, 2**31)" in caplog.text
    with twin.gpu.step([seq]) as step:
        step.write(0, zeros[:1], zeros[:1])
    assert twin.gpu.stats().blocks_published == 0
    twin.gpu.verify()
    twin.gpu.free([seq])
    twin.close()


def test_wrong_tensors_change_nothing(doubles: list[Double]) -> None:
    twin = Twin(doubles)
    twin.create([1, 2, 3])
    gpu = twin.live[0][0]
    for tokens, error, words in (
        (torch.tensor([1, 2]), ValueError, "2 entries"),
        (torch.tensor([[1]]), ValueError, "dimension"),
        (torch.tensor([1.0]), TypeError, "float32"),
    ):
        with pytest.raises(error, match=words):
            twin.gpu.append([gpu], tokens)
    drafted = twin.gpu.create(np.array([4], np.int32))
    twin.gpu.append([drafted], [5], draft=True)
    with pytest.raises(ValueError, match="draft"):
        twin.gpu.append([drafted], torch.tensor([6]))
    twin.gpu.free([drafted])
    assert not twin.gpu._runtime.sampled
    twin.check()
    twin.close()


def test_what_arrives_in_an_open_step_is_published_when_that_ends(doubles: list[Double]) -> None:
    """Publishing may merge: the step's kernels would go on with a table that is no more."""
    twin = Twin(doubles)
    twin.create([1, 2, 3])
    for _ in range(2):
        twin.step(twin.live)
    gpu, stats = twin.live[0][0], twin.gpu.stats
    with twin.gpu.step([gpu]) as step:
        published = stats().blocks_published
        assert len(gpu.tokens) == 5  # waits, and learns
        assert stats().blocks_published == published
        zeros = torch.zeros(step.num_tokens, 1, 4)
        step.write(0, zeros, zeros)
    assert stats().blocks_published == 1
    twin.close()
