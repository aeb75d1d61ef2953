"""Steps at fixed addresses: the same step as a plain one, padded, on each device; what is refused.

Two Managers are given the same calls, one plans its steps `into` buffers: its tensors have to be
those of the other with padding behind them, results the same bits, addresses always the same.
"""

from __future__ import annotations

import random
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvmem
from tests.cuda_double.opening import MODES, install
from tests.driver import Driver, assert_same, state_of, tokens_of

SIZES = {"max_seqs": 5, "max_tokens": 12, "max_context": 40}
CONFIG: dict[str, Any] = {
    "num_layers": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "v_head_dim": 4,
    "block_size": 4,
    "device_blocks": 24,
    "host_blocks": 24,
    "sync": True,
    "debug": True,
}
NAMES = ("tokens", "positions", "slot_mapping", "seq_lens", "query_start", "last", "block_table")
DEVICES = ["cpu", "sim", *(f"cuda {mode}" for mode in MODES)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, seed: int) -> str:
    """A device's name; on "cuda" there is a double of a GPU."""
    name, _, mode = request.param.partition(" ")
    if mode:
        install(monkeypatch, seed, mode)
    return str(name)


def padded(tensor: torch.Tensor, length: int, rest: int) -> torch.Tensor:
    found = tensor.new_full((length,), rest)
    found[: len(tensor)] = tensor
    return found


class Pair:
    """Two Managers and the same work on both: [0] plans plain steps, [1] into buffers."""

    def __init__(self, device: str, seed: int) -> None:
        config = kvmem.Config(**CONFIG, device=device)
        self.managers = [kvmem.Manager(config) for _ in range(2)]
        self.buffers = self.managers[1].graph_buffers(**SIZES)
        self.live: list[tuple[kvmem.Sequence, kvmem.Sequence]] = []
        self.random, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.num_steps = self.num_full = self.num_left_out = 0
        self.addresses: dict[str, int] = {}

    def both(self, seqs: list[tuple[kvmem.Sequence, kvmem.Sequence]]) -> Any:
        return zip(self.managers, zip(*seqs, strict=True), strict=True) if seqs else ()

    def act(self) -> None:
        """One legal call on both."""
        draw = self.random
        some = draw.sample(self.live, min(len(self.live), draw.randint(0, 2)))
        act = draw.randrange(5)
        if act < 2 and len(self.live) < 8:
            start, length = draw.randrange(2), draw.randint(1, 30)
            prompt = [start + i // 3 for i in range(length)]
            self.live.append(tuple(m.create(prompt) for m in self.managers))  # type: ignore[arg-type]
        elif act == 2 and some and len(self.live) < 8:
            children = [m.fork(seqs[0]) for m, seqs in self.both(some)]
            self.live.append((children[0][0], children[1][0]))
        elif act == 3:
            how = draw.choice(("swap", "recompute"))
            for manager, seqs in self.both(some):
                try:
                    manager.swap_out(list(seqs), how).wait(60)
                except (kvmem.OutOfBlocks, kvmem.TierError):
                    continue
        elif act == 4:
            self.free(some[:1])

    def free(self, seqs: list[tuple[kvmem.Sequence, kvmem.Sequence]]) -> None:
        for manager, mine in self.both(seqs):
            manager.free(list(mine))
        self.live = [pair for pair in self.live if pair not in seqs]

    def step(self) -> None:
        """The same step on both, compared."""
        self.free([pair for pair in self.live if pair[0].num_tokens >= SIZES["max_context"]])
        count = min(len(self.live), SIZES["max_seqs"], self.random.randint(0, 9))
        batch = self.random.sample(self.live, count)
        asked = [[pair[side] for pair in batch] for side in range(2)]
        first = self.managers[0].step(asked[0], fit="some", max_tokens=SIZES["max_tokens"])
        second = self.managers[1].step(asked[1], fit="some", into=self.buffers)
        with first as plain, second as fixed:
            self.compare_tensors(plain, fixed)
            self.compute(plain, fixed)
            ready = [step.ready for step in (plain, fixed)]
            rows = [[seqs.index(s) for s in r] for seqs, r in zip(asked, ready, strict=True)]
            assert rows[0] == rows[1]
            self.num_full += plain.num_tokens == SIZES["max_tokens"]
            self.num_left_out += len(plain.left_out)
        sampled = [self.random.randrange(3) for _ in ready[0]]
        for manager, seqs in zip(self.managers, ready, strict=True):
            manager.append(seqs, sampled)
        self.num_steps += 1

    def compare_tensors(self, plain: kvmem.Step, fixed: kvmem.Step) -> None:
        """What a plain step has, and padding; at the addresses of all steps before."""
        rows, tokens = SIZES["max_seqs"], SIZES["max_tokens"]
        assert (plain.num_tokens, plain.max_seq_len) == (fixed.num_tokens, fixed.max_seq_len)
        wanted = {
            "tokens": padded(plain.tokens, tokens, 0),
            "positions": padded(plain.positions, tokens, 0),
            "slot_mapping": padded(plain.slot_mapping, tokens, -1),
            "last": padded(plain.last, rows, 0),
            "seq_lens": padded(plain.seq_lens, rows, 0),
            "query_start": padded(plain.query_start, rows + 1, plain.num_tokens),
            "block_table": torch.zeros(rows, 10, dtype=torch.int32),
        }
        table = plain.block_table[:, :10]
        wanted["block_table"][: table.shape[0], : table.shape[1]] = table
        for name in NAMES:
            found = getattr(fixed, name)
            assert found.dtype == wanted[name].dtype
            assert found.tolist() == wanted[name].tolist(), name
            assert self.addresses.setdefault(name, found.data_ptr()) == found.data_ptr(), name
        assert fixed.group(1).block_table.data_ptr() == self.addresses["block_table"]

    def compute(self, plain: kvmem.Step, fixed: kvmem.Step) -> None:
        """The body of both steps."""
        for layer in range(2):
            inputs = self.inputs(plain.num_tokens)
            sinks = self.random.choice((None, [0.5, -1.0, 0.0, 2.0]))
            found = []
            for step, (key, value, query) in zip((plain, fixed), inputs, strict=True):
                step.write(layer, key, value)
                found.append(step.attend(layer, query, sinks=sinks, return_lse=True))
            self.compare_results(plain.num_tokens, *found)

    def inputs(self, count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """K, V and q of so many tokens, and padded by NaN."""
        shapes = ((2, 8), (2, 4), (4, 8))
        drawn = [self.numbers.standard_normal((SIZES["max_tokens"], *shape)) for shape in shapes]
        whole = [torch.from_numpy(numbers.astype(np.float32)) for numbers in drawn]
        for tensor in whole:
            tensor[count:] = torch.nan
        return [tensor[:count].clone() for tensor in whole], whole

    def compare_results(self, count: int, plain: Any, fixed: Any) -> None:
        """The same bits where a plain step has a token; zeros behind, whatever q, k, v hold."""
        (out, lse), (out_fixed, lse_fixed) = plain, fixed
        assert torch.equal(out, out_fixed[:count]) and torch.equal(lse, lse_fixed[:count])
        assert not out_fixed[count:].any()
        assert bool((lse_fixed[count:] == -torch.inf).all())

    def end(self) -> None:
        self.free(list(self.live))
        for manager in self.managers:
            manager.verify()
            manager.close()


def test_steps_into_buffers_are_plain_steps_padded(device: str, seed: int) -> None:
    pair = Pair(device, seed)
    while pair.num_steps < 100 or not pair.num_full:
        pair.act()
        pair.step()
    print(f"seed {seed}: {pair.num_full} full steps, {pair.num_left_out} rows left out")
    arenas = [m._runtime.store.arenas()["device"].tensor for m in pair.managers]
    assert torch.equal(*arenas)
    pair.end()


def test_tables_no_wider_than_the_device(device: str) -> None:
    """Of a context longer than the tier, whose sequences could never be resident."""
    with kvmem.Manager(kvmem.Config(**CONFIG, device=device)) as m:
        buffers = m.graph_buffers(2, 4, 1 << 20)
        assert buffers.max_context == 1 << 20
        seq = m.create([1, 2, 3])
        with m.step([seq], into=buffers) as step:
            assert tuple(step.block_table.shape) == (2, 24)
            assert buffers.num_bytes < 4096
            for layer in range(2):
                step.write(layer, torch.ones(4, 2, 8), torch.ones(4, 2, 4))
                out = step.attend(layer, torch.ones(4, 4, 8))
        assert isinstance(out, torch.Tensor)
        assert out[:, 0, 0].tolist() == [1, 1, 1, 0]
        m.free([seq])


def test_layers_under_way_are_waited_for_on_entering(device: str) -> None:
    """A graph could not wait for one step's arrivals, so the step has none left in its body."""
    config = kvmem.Config(**{**CONFIG, "sync": False, "debug": False}, device=device)
    with kvmem.Manager(config) as m:
        buffers = m.graph_buffers(**SIZES)
        seq = m.create(list(range(8)))
        with m.step([seq], into=buffers) as step:
            for layer in range(2):
                step.write(layer, torch.full((12, 2, 8), 2.0), torch.full((12, 2, 4), 3.0))
        m.swap_out([seq]).wait(60)
        m.evict(24)
        m.append([seq], [5])
        m.swap_in([seq], by_layer=1)
        with m.step([seq], into=buffers) as step:
            assert step._arriving == []
            for layer in range(2):
                step.write(layer, torch.full((12, 2, 8), 2.0), torch.full((12, 2, 4), 3.0))
                out = step.attend(layer, torch.ones(12, 2, 8))
                assert isinstance(out, torch.Tensor)
                torch.testing.assert_close(out[0], torch.full((2, 4), 3.0))
        m.free([seq])


# --- what is refused ------------------------------------------------------------------------------


def make(d: Driver, **sizes: int) -> kvmem.GraphBuffers:
    return d.manager.graph_buffers(**{"max_seqs": 2, "max_tokens": 4, "max_context": 10, **sizes})


@pytest.mark.parametrize(
    ("sizes", "kind", "text"),
    [
        ({"max_seqs": 0}, ValueError, "max_seqs=0.*>= 1"),
        ({"max_tokens": -1}, ValueError, "max_tokens=-1.*>= 1"),
        ({"max_context": 0}, ValueError, "max_context=0.*>= 1"),
        ({"max_seqs": 2.0}, TypeError, "max_seqs .*2.0"),
        ({"max_tokens": True}, TypeError, "max_tokens .*True"),
        ({"max_context": "8"}, TypeError, "max_context .*'8'"),
        ({"max_seqs": 1 << 30, "max_context": 64}, ValueError, r"max_seqs=1073741824 times .*most"),
    ],
)
def test_sizes_that_cannot_be(sizes: dict[str, Any], kind: type[Exception], text: str) -> None:
    with Driver() as d, pytest.raises(kind, match=text):
        make(d, **sizes)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "seqs": (
        lambda d, b: d.manager.step(d.live[:3], into=b),
        ValueError,
        "seqs has 3 .*max_seqs=2",
    ),
    "tokens": (
        lambda d, b: d.manager.step(d.live[:1], into=b, max_tokens=5),
        ValueError,
        "max_tokens=5; allowed: max_tokens=4 of into",
    ),
    "context": (
        lambda d, b: d.manager.step([d.live[0], d.live[3]], into=b),
        ValueError,
        r"seqs\[1\] has 11 tokens; allowed: max_context=10",
    ),
    "no buffers": (
        lambda d, b: d.manager.step(d.live[:1], into=5),
        TypeError,
        "into must be a kvmem.GraphBuffers, not int",
    ),
    "released": (
        lambda d, b: (b.release(), d.manager.step(d.live[:1], into=b)),
        RuntimeError,
        "into was released",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_changes_nothing(name: str, seed: int) -> None:
    call, kind, text = REFUSED[name]
    with Driver() as d:
        buffers = make(d)
        for length in (3, 2, 4, 11):
            d.create(tokens_of(length))
        d.step(d.live[:2])
        d.manager.append(d.live[:2], [7, 8])
        before = state_of(d.manager)
        with pytest.raises(kind, match=text) as caught:
            call(d, buffers)
        assert len(str(caught.value)) <= 300
        assert_same(before, state_of(d.manager))
        if not buffers.released:
            with d.manager.step(d.live[:2], into=buffers) as step:
                assert step.num_tokens == 2
                for layer in range(2):
                    step.write(layer, torch.ones(4, 1, 4), torch.ones(4, 1, 4))


def test_no_more_tokens_than_the_buffers_hold() -> None:
    """Without `max_tokens` the buffers say it: long prompts come in chunks."""
    with Driver() as d:
        buffers, seq = make(d), d.create(tokens_of(10))
        lengths = []
        for _ in range(3):
            with d.manager.step([seq], into=buffers) as step:
                lengths.append(step.num_tokens)
        assert lengths == [4, 4, 2]
        assert seq.num_computed == 10


def test_one_step_at_a_time() -> None:
    with Driver() as d:
        buffers, other = make(d), make(d)
        one, two = d.create(tokens_of(3)), d.create(tokens_of(9, 5))
        step = d.manager.step([one], into=buffers)
        assert buffers.in_use and not other.in_use
        before = state_of(d.manager)
        with pytest.raises(RuntimeError, match="into is in use by an open step"):
            d.manager.step([two], into=buffers)
        with pytest.raises(RuntimeError, match="a step is open in these buffers"):
            buffers.release()
        assert_same(before, state_of(d.manager))
        with d.manager.step([two], into=other) as second, step:
            assert step.tokens[:3].tolist() == [0, 1, 2]
            assert second.tokens.tolist() == [5, 6, 7, 8]
        assert not buffers.in_use
        cancelled = d.manager.step([two], into=buffers, num_tokens=[0])
        cancelled.cancel()
        assert not buffers.in_use
        dropped = d.manager.step([two], into=buffers, num_tokens=[0])
        refs = [dropped]
        del dropped
        with pytest.warns(ResourceWarning, match="was dropped"):
            refs.clear()
        assert not buffers.in_use
        with pytest.raises(ZeroDivisionError), d.manager.step([two], into=buffers, num_tokens=[0]):
            _ = 1 // 0
        assert not buffers.in_use
        buffers.release()
        buffers.release()
        assert buffers.released and "released" in repr(buffers)


def test_buffers_of_another_manager() -> None:
    with Driver() as d, Driver() as e:
        seq, buffers = d.create(tokens_of(3)), make(e)
        before = state_of(d.manager)
        with pytest.raises(ValueError, match="into belongs to another Manager"):
            d.manager.step([seq], into=buffers)
        assert_same(before, state_of(d.manager))


def test_tensors_are_there_from_entering_on() -> None:
    with Driver() as d:
        buffers, seq = make(d), d.create(tokens_of(3))
        step = d.manager.step([seq], into=buffers)
        with pytest.raises(RuntimeError, match="enter the step first"):
            _ = step.tokens
        with step:
            for layer in range(2):
                step.write(layer, torch.ones(4, 1, 4), torch.ones(4, 1, 4))
            with pytest.raises(kvmem.ShapeError, match=r"\(3, 1, 4\); expected \(4, 1, 4\)"):
                step.write(0, torch.ones(3, 1, 4), torch.ones(3, 1, 4))
            with pytest.raises(kvmem.ShapeError, match=r"query has shape \(3, 2, 4\)"):
                step.attend(0, torch.ones(3, 2, 4))
        assert step.tokens.tolist() == [0, 1, 2, 0]
        d.manager.append([seq], [9])
        with d.manager.step([seq], into=buffers) as later:
            assert later.tokens.tolist() == [9, 0, 0, 0]
        with pytest.raises(RuntimeError, match="its buffers hold another step's arrays"):
            _ = step.tokens
        with pytest.raises(RuntimeError, match="this step has ended"):
            step.write(0, torch.ones(4, 1, 4), torch.ones(4, 1, 4))


def test_after_close() -> None:
    d = Driver()
    buffers, seq = make(d), d.create(tokens_of(3))
    step = d.manager.step([seq], into=buffers)
    d.manager.close()
    assert not buffers.in_use
    step.cancel()
    for call in (
        lambda: d.manager.graph_buffers(1, 1, 1),
        lambda: d.manager.step([seq], into=buffers),
    ):
        with pytest.raises(kvmem.ManagerClosed):
            call()
    buffers.release()
    seq = None  # type: ignore[assignment]


def test_the_example_answers_as_plain_steps_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/examples/cuda_graph.py without a GPU; it compares by itself, and would say so."""
    path = Path(__file__).resolve().parents[1] / "docs" / "examples" / "cuda_graph.py"
    example = runpy.run_path(str(path))
    found = example["main"]("cpu")
    assert [len(answer) for answer in found] == [4, 7, 10, 13, 16, 19]
    assert len({token for answer in found for token in answer}) > 10
    decoder = example["GraphDecoder"]
    right = decoder.decode
    monkeypatch.setattr(decoder, "decode", lambda *a: [(t + 1) % 64 for t in right(*a)])
    with pytest.raises(SystemExit, match="other tokens"):
        example["main"]("cpu")
