"""Managers as an engine has them, filled, and turns of work that are timed on the host.

They are `Manager(device="cuda")`: with tests a double of a GPU stands behind that name. What a
frame holds is random, so that no copy and no sum has it easier than with real K and V.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.gpu.clock import Budget, Spread, Timing
from tools.gpu.record import Bench, Row

if TYPE_CHECKING:
    import kvmem

#: Left alone: workspaces, tables, what torch keeps.
ROOM = 2 << 30
VOCABULARY = 1000


@dataclass(frozen=True, slots=True)
class Shape:
    """The cache of a model; the sizes of Llama-3-8B unless told otherwise."""

    layers: int = 32
    kv_heads: int = 8
    dims: int = 128
    heads: int = 32
    block: int = 16
    dtype: str = "bfloat16"

    @property
    def block_bytes(self) -> int:
        """K and V of a block, all layers."""
        return self.layers * self.layer_bytes

    @property
    def layer_bytes(self) -> int:
        """K and V of a block in one layer."""
        item = 4 if self.dtype == "float32" else 2
        return 2 * self.kv_heads * self.block * self.dims * item

    @property
    def name(self) -> str:
        """As progress lines and reports say it."""
        return f"{self.layers} layers of {self.heads}/{self.kv_heads} x {self.dims} {self.dtype}"


def size(num_bytes: float) -> str:
    """Bytes in words."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.4g} {unit}"
    return f"{num_bytes / 1024:.4g} KiB"


def open_manager(
    shape: Shape, device_blocks: int, host_blocks: int = 0, **options: Any
) -> kvmem.Manager:
    """A Manager on the GPU. Raises ConfigError where the machine has too little memory."""
    import kvmem

    return kvmem.Manager(
        kvmem.Config(
            num_layers=shape.layers, num_kv_heads=shape.kv_heads, head_dim=shape.dims,
            dtype=shape.dtype, block_size=shape.block, device="cuda",
            device_blocks=device_blocks, host_blocks=host_blocks, **options,
        )
    )  # fmt: skip


def fill(
    manager: kvmem.Manager, rows: int, tokens: int, *, scattered: bool = True
) -> list[kvmem.Sequence]:
    """``rows`` sequences of ``tokens`` computed tokens each, whose frames follow each other or, as
    those of sequences that grew together, lie scattered. Nothing of them is shared."""
    draw = np.random.default_rng(rows * tokens)
    seqs = [
        manager.create(draw.integers(0, VOCABULARY, tokens).astype(np.int32), publish=False)
        for _ in range(rows)
    ]
    chunk = manager.config.block_size if scattered else tokens
    for begin in range(0, tokens, chunk):
        with manager.step(seqs, num_tokens=min(chunk, tokens - begin)):
            pass  # K and V are what lies in the frames
    return seqs


def randomise(manager: kvmem.Manager) -> None:
    """Random numbers in all frames, but for the null frame."""
    for layer in range(manager.config.num_layers):
        for plane in manager.kv(layer):
            plane[1:].uniform_(-1, 1)


def vacate(manager: kvmem.Manager) -> None:
    """Take the GPU's frames of what has been swapped out: it would else come back without a copy,
    for a frame keeps its content until another block needs it."""
    manager.poll()
    manager.evict(manager.config.device_blocks)


def synchronize(bench: Bench) -> None:
    """Wait on the host for the current stream alone: copies on others go on."""
    if bench.place != "cpu":
        bench.torch.cuda.current_stream().synchronize()


def on(bench: Bench, stream: Any) -> AbstractContextManager[Any]:
    """Work inside goes to that stream, where there are streams."""
    return nullcontext() if stream is None else bench.torch.cuda.stream(stream)


class Decoder:
    """One more token for each sequence: K and V written, attention, in each layer."""

    def __init__(
        self, bench: Bench, manager: kvmem.Manager, shape: Shape, seqs: list[kvmem.Sequence]
    ) -> None:
        torch = bench.torch
        kind = {"dtype": getattr(torch, shape.dtype), "device": bench.place}
        self.bench, self.manager, self.shape, self.seqs = bench, manager, shape, seqs
        torch.manual_seed(0)
        self.query = torch.randn((len(seqs), shape.heads, shape.dims), **kind)
        self.key, self.value = (
            torch.randn((len(seqs), shape.kv_heads, shape.dims), **kind) for _ in range(2)
        )
        self.out = torch.zeros_like(self.query)
        self.launching: list[float] = []  # seconds of the host until all of a step was launched
        self._tokens = np.ones(len(seqs), np.int32)

    def append(self) -> None:
        """What was sampled."""
        self.manager.append(self.seqs, self._tokens)

    def layer(self, step: kvmem.Step, number: int) -> None:
        """One layer of a step."""
        step.write(number, self.key, self.value)
        step.attend(number, self.query, out=self.out)

    def layers(self, step: kvmem.Step) -> None:
        """All of them."""
        for number in range(self.shape.layers):
            self.layer(step, number)

    def step(self, then: Callable[[], object] = lambda: None) -> float:
        """A step to its end; seconds of the host. ``then`` is called while the GPU is at work."""
        begin = self.bench.now()
        self.append()
        with self.manager.step(self.seqs) as step:
            self.layers(step)
        self.launching.append(self.bench.now() - begin)
        then()
        synchronize(self.bench)
        return self.bench.now() - begin


def in_turns(
    bench: Bench,
    sides: Mapping[str, Callable[[], float]],
    seconds: float,
    *,
    least_turns: int = 3,
    most_turns: int = 25,
) -> dict[str, Spread | str]:
    """Sides that time themselves, in turns; a turn before the first doesn't count.

    Of a side that raises, the reason. It ends after ``most_turns``, or when ``seconds`` are over
    and there were ``least_turns``.
    """
    found: dict[str, Spread | str] = {}
    taken: dict[str, list[Timing]] = {name: [] for name in sides}
    begin = bench.now()
    for turn in range(most_turns + 1):
        if turn > least_turns and bench.now() - begin > seconds:
            break
        for name, run in sides.items():
            if name in found:
                continue
            try:
                spent = run()
            except Exception as error:  # the other sides go on
                found[name] = f"failed: {type(error).__name__}: {str(error)[:200]}"
                continue
            if turn:
                taken[name].append(Timing(spent, True))
    return found | {
        name: Spread.of(some) for name, some in taken.items() if some and name not in found
    }


def run_case(bench: Bench, budget: Budget, name: str, run: Callable[[], None]) -> None:
    """One case, if there is time: what doesn't fit in memory is named, another error is a row."""
    from kvmem import ConfigError

    if not budget.allows(name):
        return
    try:
        run()
    except (bench.torch.OutOfMemoryError, ConfigError) as error:
        budget.left_out.append(f"{name}: memory: {str(error)[:200]}")
    except Exception as error:  # the other cases go on
        bench.keep(Row(name, {}, 0, f"failed: {type(error).__name__}: {str(error)[:300]}"))
    gc.collect()
    if bench.place != "cpu":
        bench.torch.cuda.empty_cache()


def lacks_room(bench: Bench, budget: Budget, name: str, num_bytes: int) -> bool:
    """Whether the GPU has too little memory for a case, which is named then."""
    free = bench.free_bytes() - ROOM
    if num_bytes > free:
        budget.left_out.append(
            f"{name}: it needs {size(num_bytes)} of the GPU, {size(max(free, 0))} are free"
        )
    return num_bytes > free
