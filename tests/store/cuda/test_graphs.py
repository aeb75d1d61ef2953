"""Graphs on the double of a GPU: what a capture may hold, and that replays find later contents.

The double refuses, while it captures, all but kernels on the capturing stream: no event, no copy,
no allocation, no wait of the host. A replay runs the kernels again over the same addresses.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

import kvmem
from cuda_kernels.attention import cuda_call as attention
from cuda_kernels.cache_write import cuda_call as cache_write
from cuda_kernels.cuda.kernel import Launch
from tests.cuda_double.kernels import KernelDevice
from tests.cuda_double.opening import MODES, Double, install
from tests.cuda_double.torch_cuda import Stream
from tests.test_graph_buffers import CONFIG, NAMES, SIZES, Pair

KERNELS = ["write kernel", "attention kernel"] * 2


class GraphPair(Pair):
    """A `Pair` whose second Manager captures its first step's work and replays it in each."""

    def __init__(self, doubles: list[Double], seed: int, *, late: bool) -> None:
        super().__init__("cuda", seed)
        self.double = doubles[1]
        self.late = late
        self.static = [self.inputs(0)[1] for _ in range(2)]
        self.out = [torch.empty(SIZES["max_tokens"], 4, 4) for _ in range(2)]
        self.lse: list[torch.Tensor] = []
        self.graph = self.double.torch.CUDAGraph()
        self.pending: tuple[int, list[Any]] | None = None

    def compare_tensors(self, plain: kvmem.Step, fixed: kvmem.Step) -> None:
        if not self.late:
            super().compare_tensors(plain, fixed)
            return
        for name in NAMES:  # what they hold is on its way
            found = getattr(fixed, name).data_ptr()
            assert self.addresses.setdefault(name, found) == found

    def compute(self, plain: kvmem.Step, fixed: kvmem.Step) -> None:
        """With ``late``, this step's arrays are queued before the last step's kernels ran."""
        self.check()
        count, results = plain.num_tokens, []
        for layer in range(2):
            inputs, whole = self.inputs(count)
            plain.write(layer, *inputs[:2])
            results.append(plain.attend(layer, inputs[2], return_lse=True))
            for tensor, numbers in zip(self.static[layer], whole, strict=True):
                tensor.copy_(numbers)
        if not self.lse:
            kept = self.run(fixed)  # warm-up; torch would keep freed memory until it has run
            self.double.torch.current_stream(self.double.cuda.ordinal).synchronize()
            kept.clear()
            before = dict(self.double.runtime.calls), self.double.torch.num_events
            with self.double.torch.graph(self.graph):
                self.lse = self.run(fixed)
            assert [what for what, _, _ in self.graph.launched] == KERNELS
            assert (dict(self.double.runtime.calls), self.double.torch.num_events) == before
        self.graph.replay()
        self.pending = count, results
        if not self.late:
            self.check()

    def run(self, step: kvmem.Step) -> list[torch.Tensor]:
        found = []
        for layer in range(2):
            key, value, query = self.static[layer]
            step.write(layer, key, value)
            found.append(step.attend(layer, query, return_lse=True, out=self.out[layer])[1])
        return found

    def check(self) -> None:
        """Compare what the last step's replay left."""
        if self.pending is None:
            return
        self.double.torch.current_stream(self.double.cuda.ordinal).synchronize()
        (count, results), self.pending = self.pending, None
        for layer in range(2):
            self.compare_results(count, results[layer], (self.out[layer], self.lse[layer]))


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("mode", MODES)
def test_replays_are_plain_steps(
    mode: str, late: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubles = install(monkeypatch, seed, mode)
    pair = GraphPair(doubles, seed, late=late)
    double = pair.double
    stream = double.torch.Stream(device=double.cuda.ordinal, priority=-1 if late else 0)
    with double.torch.stream(stream):
        while pair.num_steps < 60 or not pair.num_full:
            pair.act()
            pair.step()
        pair.check()
        stream.synchronize()
        print(f"seed {seed}: {pair.num_full} full steps, {pair.num_left_out} rows left out")
        arenas = [m._runtime.store.arenas()["device"].tensor for m in pair.managers]
        assert torch.equal(*arenas)
        pair.end()


# --- what a capture refuses -----------------------------------------------------------------------


class World:
    """One Manager on a double, a sequence with three tokens pending."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.doubles = install(monkeypatch, seed, "random")
        config = {**CONFIG, "debug": False}
        self.manager = kvmem.Manager(kvmem.Config(**config, device="cuda"))
        self.torch = self.doubles[0].torch
        self.seq = self.manager.create([1, 2, 3])
        self.buffers = self.manager.graph_buffers(**SIZES)
        self.graph = self.torch.CUDAGraph()

    def inputs(self, count: int) -> list[torch.Tensor]:
        return [torch.ones(count, *shape) for shape in ((2, 8), (2, 4), (4, 8))]

    def end(self) -> None:
        self.manager.free([self.seq])
        self.manager.verify()
        self.manager.close()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, seed: int) -> World:
    return World(monkeypatch, seed)


@pytest.mark.parametrize("uploaded", [False, True])
def test_a_plain_step_is_refused_in_a_capture(world: World, uploaded: bool) -> None:
    """Its arrays would be baked in, whether they are on the GPU already or not."""
    key, value, query = world.inputs(3)
    with world.manager.step([world.seq]) as step:
        if uploaded:
            step.write(0, key, value)
            assert step.block_table.tolist() == [[1]]
        acts: list[Any] = [
            lambda: step.write(0, key, value),
            lambda: step.attend(0, query),
        ]
        if not uploaded:
            acts += [lambda: step.tokens, lambda: step.block_table]
        for act in acts:
            with (
                world.torch.graph(world.graph),
                pytest.raises(RuntimeError, match=r"captured.*Manager\.graph_buffers"),
            ):
                act()
        assert world.graph.launched == []
        for layer in range(2):
            step.write(layer, key, value)
            out = step.attend(layer, query)
        assert isinstance(out, torch.Tensor)
        torch.testing.assert_close(out, torch.ones(3, 4, 4))
    world.end()


def test_raw_arrays_are_refused_in_a_capture(world: World) -> None:
    """`Store.write` without arrays on the GPU, which it would have to upload."""
    store = world.manager._runtime.store
    key, value, _ = world.inputs(1)
    with (
        world.torch.graph(world.graph),
        pytest.raises(RuntimeError, match="graph_buffers"),
    ):
        store.write(0, key, value, np.array([4]))
    world.end()


def test_a_step_is_not_entered_in_a_capture(world: World) -> None:
    step = world.manager.step([world.seq], into=world.buffers)
    with (
        world.torch.graph(world.graph),
        pytest.raises(RuntimeError, match="can't be entered while a CUDA graph is captured"),
    ):
        step.__enter__()
    with step:
        assert step.tokens[:4].tolist() == [1, 2, 3, 0]
        for layer in range(2):
            step.write(layer, *world.inputs(12)[:2])
    assert world.seq.num_computed == 3
    world.end()


def test_vectors_are_on_the_gpu_before_a_capture(world: World) -> None:
    key, value, query = world.inputs(12)
    numbers = [0.5, 0.25, 2.0, -1.0]
    with world.manager.step([world.seq], into=world.buffers) as step:
        step.write(0, key, value)
        for name in ("alibi", "sinks"):
            with world.torch.graph(world.graph):
                with pytest.raises(RuntimeError, match=f"{name} is not on the GPU yet"):
                    step.attend(0, query, **{name: numbers})  # type: ignore[arg-type]
                world.doubles[0].owns_tensors = True  # one of the GPU is read where it lies
                step.attend(0, query, **{name: torch.tensor(numbers)})  # type: ignore[arg-type]
            world.doubles[0].owns_tensors = False
            assert len(world.graph.launched) == 1
            step.attend(0, query, **{name: [n + 1 for n in numbers]})  # type: ignore[arg-type]
            world.graph.launched.clear()
        with world.torch.graph(world.graph):
            step.attend(0, query, alibi=[n + 1 for n in numbers], sinks=[n + 1 for n in numbers])
        assert len(world.graph.launched) == 1
        step.write(1, key, value)
    world.end()


# --- what the kernels are given -------------------------------------------------------------------


def test_launches_hang_on_the_sizes_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grids, splits and addresses: the same for every batch, cut over blocks as for the longest."""
    real = attention.attend, cache_write.write
    made: list[Launch] = []
    install(monkeypatch, seed, "eager")
    monkeypatch.setattr(attention, "attend", real[0])
    monkeypatch.setattr(cache_write, "write", real[1])
    monkeypatch.setattr(KernelDevice, "launch", lambda self, launch, stream: made.append(launch))
    config = {**CONFIG, "device_blocks": 400, "debug": False, "host_blocks": 0}
    with kvmem.Manager(kvmem.Config(**config, device="cuda")) as m:
        buffers = m.graph_buffers(max_seqs=3, max_tokens=6, max_context=1500)
        shapes = ((2, 8), (2, 4), (4, 8))
        key, value, query = (torch.zeros(6, *shape) for shape in shapes)
        out = torch.zeros(6, 4, 4)
        rng = np.random.default_rng(seed)
        seqs = [m.create(rng.integers(0, 9, n)) for n in (1, 5, 40)]
        seen: list[list[Launch]] = []
        for _ in range(12):
            batch = [seq for seq in seqs if rng.random() < 0.7]
            with m.step(batch, into=buffers) as step:
                step.write(1, key, value)
                step.attend(1, query, out=out)
            seen.append(made.copy())
            made.clear()
            m.append(step.ready, rng.integers(0, 9, len(step.ready)))
        m.free(seqs)
    first = seen[0]
    assert [launch.source.name[:5] for launch in first] == ["write", "atten", "merge"]
    assert [launch.grid for launch in first] == [(6, 2, 1), (6, 4, 3), (6, 4, 1)]
    workspace = first[2].arguments[0]  # torch's, from the graph's pool in a capture
    for launches in seen:
        assert [(a.source, a.grid) for a in launches] == [(b.source, b.grid) for b in first]
        own = launches[2].arguments[0]
        for launch, wanted in zip(launches, first, strict=True):
            pairs = zip(launch.arguments, wanted.arguments, strict=True)
            assert all(a == b or (a, b) == (own, workspace) for a, b in pairs)


# --- tokens that only the GPU knows ---------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_sampled_tokens_reach_the_buffers(
    mode: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Appended as a tensor of the GPU, they are in the next step's tokens, arrived here or not."""
    doubles = install(monkeypatch, seed, mode)
    rng = np.random.default_rng(seed)
    num_unknown = 0
    with kvmem.Manager(kvmem.Config(**{**CONFIG, "debug": False}, device="cuda")) as m:
        doubles[0].owns_tensors = True
        buffers = m.graph_buffers(**SIZES)
        seqs = [m.create(rng.integers(0, 99, n)) for n in (2, 7, 18)]
        known = {seq.id: seq.tokens.tolist() for seq in seqs}
        for _ in range(20):
            batch = [seqs[i] for i in rng.permutation(3)[: rng.integers(1, 4)]]
            with m.step(batch, into=buffers) as step:
                num_unknown += bool(m._runtime.sampled)
                starts = step.query_start.tolist()
                for row, seq in enumerate(step.seqs):
                    part = slice(starts[row], starts[row + 1])
                    wanted = [known[seq.id][p] for p in step.positions[part].tolist()]
                    assert step.tokens[part].tolist() == wanted
                assert not step.tokens[starts[-1] :].any()
                for layer in range(2):
                    step.write(layer, torch.zeros(12, 2, 8), torch.zeros(12, 2, 4))
            sampled = torch.from_numpy(rng.integers(100, 999, len(step.ready)))
            for seq, token in zip(step.ready, sampled.tolist(), strict=True):
                known[seq.id].append(token)
            m.append(step.ready, sampled)
        assert [seq.tokens.tolist() for seq in seqs] == [known[seq.id] for seq in seqs]
        m.free(seqs)
    assert num_unknown > 0 or mode == "eager"


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["released", "dropped"])
def test_memory_stays_until_copies_have_run(world: World, how: str) -> None:
    """Nobody holds the buffers any more while their copy is queued behind held work."""
    device: Any = world.manager._runtime.store.device
    stream = world.torch.Stream(device=device.cuda.ordinal, priority=-1)
    assert isinstance(stream, Stream)
    used = device.cuda.torch._memory.used
    with world.torch.stream(stream):
        device.streams.hold(stream.cuda_stream)
        step = world.manager.step([world.seq], into=world.buffers)
        with step:
            pass
        if how == "released":
            world.buffers.release()
        del step
        world.buffers = None  # type: ignore[assignment]
        gc.collect()
        assert len(device._parked) == 1
        assert device.cuda.torch._memory.used == used
        device.streams.let_go(stream.cuda_stream)
        stream.synchronize()  # the copy runs: the double looks whose memory it touches
        world.manager.graph_buffers(**SIZES).release()
        gc.collect()
        world.manager.graph_buffers(**SIZES).release()
        gc.collect()
        assert len(device._parked) <= 1
    world.end()


def test_arrays_of_several_steps_are_on_their_way(world: World) -> None:
    """None of the copies has run when the next step fills its page-locked memory."""
    device: Any = world.manager._runtime.store.device
    stream = world.torch.Stream(device=device.cuda.ordinal, priority=-1)
    kept = []
    with world.torch.stream(stream):
        device.streams.hold(stream.cuda_stream)
        for number in range(5):
            with world.manager.step([world.seq], into=world.buffers) as step:
                for layer in range(2):
                    kept += [torch.full((12, 2, n), 10.0 * number + layer) for n in (8, 4)]
                    step.write(layer, *kept[-2:])
            world.manager.append([world.seq], [number])
        device.streams.let_go(stream.cuda_stream)
        stream.synchronize()
    blocks = [world.manager.block(b) for b in world.seq.block_ids]
    found = torch.cat([block.k_data(1) for block in blocks])[:7, 0, 0]
    assert found.tolist() == [1, 1, 1, 11, 21, 31, 41]
    world.end()
