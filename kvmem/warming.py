"""`warmup`: compile, or load from the cache, all that a Manager of some Config will call.

A small Manager of the same dtype and options goes through every kind of call, so what is compiled
is what the real one asks for. No list of functions is kept that an edit could leave behind: those
compiled and loaded are counted where they are, in the loaded modules.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numba
import numpy as np
import torch
from numba.core.dispatcher import Dispatcher

from kvmem.checks import shown
from kvmem.config import Config
from kvmem.manager import Manager
from kvmem.sequence import Sequence
from kvmem.step import Step

#: Called before each stage with (stages done, stages in all, what comes next), and once at the end
#: with (all, all, "ready").
Progress = Callable[[int, int, str], None]

# Past these, attention runs on all threads, and one long row is split over them; with a margin.
_MANY_VALUES, _MANY_POSITIONS = 2**20, 2500
_MOST_ROWS = 256
_PACKAGES = ("kvmem.", "cuda_kernels.")


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """What `warmup` did. The counts are compiled functions, once for each type of arguments."""

    seconds: float
    num_compiled: int  # were not in the cache: the first time on this kind of processor
    num_loaded: int  # came from the cache
    cache_folder: str  # where other processes will find them
    num_kernels_compiled: int = 0  # CUDA kernels
    num_kernels_loaded: int = 0
    kernel_cache_folder: str = ""  # "": none was asked for


def warmup(
    config: Config,
    *,
    progress: Progress | None = None,
    compute_capability: tuple[int, int] | None = None,
) -> WarmupReport:
    """Compile, or load from Numba's cache, what the calls of a `Manager(config)` run.

    To be called before serving, and when a container image is built, with `NUMBA_CACHE_DIR` naming
    a folder of the image. What is compiled hangs on the dtype and the processor, not on sizes: one
    call a dtype does for all configs. Legal beside live Managers, which it leaves alone.

    With `device="cuda"` the calls run on that GPU, and the CUDA kernels for the config's dtype and
    head sizes are made for it. With `compute_capability`, (9, 0) say, the kernels are made for such
    a GPU and nothing runs on one: for an image that is built without. They are kept in
    `KVMEM_CUDA_CACHE_DIR`.

    `progress(done, total, what)` is called before each stage and at the end. Without it, a line on
    stderr says so where that is a terminal. Cost: 1 to 3 s with a filled cache; without, what
    docs/warmup.md measured; some MiB of memory until it returns. Raises TypeError for what is no
    Config, and whatever a Manager raises where the system refuses memory; with a GPU asked for,
    DeviceUnavailable, and MissingLibrary (an ImportError) where kernels can't be compiled.
    """
    if not isinstance(config, Config):
        raise TypeError(f"config must be a kvmem.Config, not {type(config).__name__}")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be callable or None, not {type(progress).__name__}")
    if numba.config.DISABLE_JIT:  # all runs as plain Python: nothing to do, and slowly
        return WarmupReport(seconds=0.0, num_compiled=0, num_loaded=0, cache_folder="")
    capability = checked_capability(compute_capability)
    tell = progress if progress is not None else _default_progress()
    begin = time.perf_counter()
    before = _counts()
    with Manager(_small(config, "cpu" if capability else config.device)) as manager:
        if config.on_gpu and capability is None:
            device: Any = manager._runtime.store.device
            capability = device.cuda.kernels.capability
        rehearsal = _Rehearsal(manager)
        for done, (what, run) in enumerate(STAGES):
            tell(done, len(STAGES), what)
            run(rehearsal)
        tell(len(STAGES), len(STAGES), "ready")
    compiled, loaded = _counts()
    report = WarmupReport(
        seconds=round(time.perf_counter() - begin, 3),
        num_compiled=compiled - before[0],
        num_loaded=loaded - before[1],
        cache_folder=_cache_folder(),
    )
    if capability is None:
        return report
    from kvmem.store.cuda.kernel_cache import fill_kernel_cache

    made = fill_kernel_cache(config, capability, progress=tell)
    return replace(
        report,
        seconds=round(time.perf_counter() - begin, 3),
        num_kernels_compiled=made.num_compiled,
        num_kernels_loaded=made.num_loaded,
        kernel_cache_folder=str(made.folder),
    )


def checked_capability(value: Any) -> tuple[int, int] | None:
    """A GPU's compute capability, (8, 0) and later. Raises TypeError, ValueError."""
    if value is None:
        return None
    numbers = tuple(value) if isinstance(value, (tuple, list)) else ()
    if len(numbers) != 2 or not all(isinstance(n, int) and type(n) is not bool for n in numbers):
        raise TypeError(f"compute_capability must be two ints such as (9, 0), not {shown(value)}")
    if not ((8, 0) <= numbers < (100, 0) and 0 <= numbers[1] <= 9):
        raise ValueError(f"compute_capability={shown(value)}; allowed: (8, 0) and later")
    return numbers


class _Rehearsal:
    """One small Manager and the calls that make it compile. A stage ends with no sequence live."""

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self.block = manager.config.block_size

    def sequences(self) -> None:
        """The calls that touch tokens only."""
        manager, size = self.manager, 2 * self.block + 1
        seq = manager.create(_tokens(size))
        other = manager.create(_tokens(size), extras=[(0, 1, b"0123456789abcdef")])
        manager.append([seq], [1])
        manager.append([other], [1, 2], counts=[2], draft=True)
        manager.accept([other], [1], [3])
        self._learn_tokens([seq])
        manager.truncate([seq, other], size)
        manager.free([seq, other])

    def _learn_tokens(self, seqs: list[Sequence]) -> None:
        """As `append` does with tokens of a GPU: appended now, known later."""
        runtime = self.manager._runtime
        records = np.array([seq._record for seq in seqs], np.int32)
        counts = np.ones(len(seqs), np.int64)
        runtime.ledger.append_unknown(records, counts)
        runtime.submit(runtime.ledger.learn(records, counts, np.ones(len(seqs), np.int32)))

    def steps(self) -> None:
        """Plan, compute, publish; one step that is given up."""
        manager = self.manager
        seqs = [manager.create(_tokens(self.block + 2, first)) for first in (1, 2)]
        manager.can_fit(self.block, seqs=seqs)
        manager.make_room(seqs)
        with manager.step(seqs, max_tokens=self.block + 3, fit="some") as step:
            self._compute(step)
        with manager.step(seqs) as step:
            self._compute(step, strided=True)
        manager.append(seqs, [1, 1])
        manager.step(seqs).cancel()
        manager.match(_tokens(self.block + 2, 1))
        manager.free(seqs)

    def attention(self) -> None:
        """One long row, whose positions are split over threads; then rows enough for all."""
        manager, config = self.manager, self.manager.config
        seq = manager.create(_tokens(_MANY_POSITIONS), publish=False)
        with manager.step([seq]) as step:
            self._compute(step, attend=False)
        manager.append([seq], [1])
        with manager.step([seq]) as step:
            self._compute(step)
        rows = manager.fork(seq, _num_rows(config) - 1) + [seq]
        manager.append(rows, np.zeros(len(rows), np.int32))
        with manager.step(rows) as step:  # each copies the last block on write
            self._compute(step)
        manager.free(rows)
        manager.evict(config.device_blocks)

    def swaps(self) -> None:
        """To the host, back, and given up."""
        manager = self.manager
        seq = manager.create(_tokens(2 * self.block))
        with manager.step([seq]) as step:
            self._compute(step)
        manager.swap_out([seq]).wait()
        manager.evict(2)
        manager.prefetch([seq])
        manager.swap_in([seq]).wait()
        with manager.pin(seq):
            pass
        manager.swap_out([seq], how="recompute")
        manager.free([seq])
        manager.evict(2, tier="host")
        manager.reset()
        manager.poll()
        ledger = manager._runtime.ledger
        ledger.clean(1)  # copies nothing under this policy, but is compiled
        ledger.rehearse_failure()

    def _compute(self, step: Step, *, strided: bool = False, attend: bool = True) -> None:
        """Write and attend in each layer, with contiguous tensors or with transposed ones."""
        config = self.manager.config

        def tensor(heads: int, dim: int) -> torch.Tensor:
            where = step.tokens.device
            if strided:
                shape = heads, step.num_tokens, dim
                return torch.zeros(shape, dtype=config.dtype, device=where).transpose(0, 1)
            return torch.zeros(step.num_tokens, heads, dim, dtype=config.dtype, device=where)

        key = tensor(config.num_kv_heads, config.head_dim)
        value = tensor(config.num_kv_heads, config.v_head_dim)
        query = tensor(2 * config.num_kv_heads, config.head_dim)
        _ = step.block_table
        for layer in range(config.num_layers):
            step.write(layer, key, value)
            if attend:
                step.attend(layer, query, return_lse=True)
                each = torch.zeros(query.shape[1])  # a number a head is an array type of its own
                step.attend(layer, query, alibi=each, sinks=each)


#: What `warmup` goes through, in this order.
STAGES: tuple[tuple[str, Callable[[_Rehearsal], None]], ...] = (
    ("sequences", _Rehearsal.sequences),
    ("steps", _Rehearsal.steps),
    ("attention", _Rehearsal.attention),
    ("swaps", _Rehearsal.swaps),
)


def _small(config: Config, device: str) -> Config:
    """The same dtype, head sizes and options with two heads, one layer and few blocks.

    Always with a host tier: `swap_out(how="auto")` asks the ledger for one where there is none.
    """
    blocks = -(-_MANY_POSITIONS // config.block_size) + _num_rows(config) + 8
    return Config(
        num_layers=1,
        num_kv_heads=min(2, config.num_kv_heads),  # one head alone is another memory layout
        head_dim=config.head_dim,
        v_head_dim=config.v_head_dim,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        device=device,
        block_size=config.block_size,
        device_blocks=blocks,
        host_blocks=8,
        window=config.window,
        eviction=config.eviction,
        sync=config.sync,
        debug=config.debug,
        zero_on_free=config.zero_on_free,
    )


def _num_rows(config: Config) -> int:
    """Rows that together read enough to keep all threads busy."""
    positions = min(_MANY_POSITIONS, config.window or _MANY_POSITIONS)
    values = positions * (config.head_dim + config.v_head_dim)
    return max(2, min(_MOST_ROWS, -(-_MANY_VALUES // values)))


def _tokens(count: int, first: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.arange(first, first + count, dtype=np.int32)


def _default_progress() -> Progress:
    """A line on stderr where that is a terminal; a service's log stays as it is."""
    stream = sys.stderr
    if stream is None or not stream.isatty():
        return lambda done, total, what: None

    def line(done: int, total: int, what: str) -> None:
        end = "\n" if done == total else ""
        with contextlib.suppress(OSError):
            stream.write(f"\r\x1b[Kkvmem warmup: {done}/{total} {what}{end}")
            stream.flush()

    return line


def _functions() -> Iterator[Any]:
    """The compiled functions of the loaded modules, whatever they are called."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGES):
            for value in list(vars(module).values()):
                if isinstance(value, Dispatcher) and value.py_func.__module__ == name:
                    yield value


def _counts() -> tuple[int, int]:
    """How often a function was compiled, and loaded from the cache, in this process."""
    stats = [function.stats for function in _functions()]
    compiled = sum(sum(one.cache_misses.values()) for one in stats)
    return compiled, sum(sum(one.cache_hits.values()) for one in stats)


def _cache_folder() -> str:
    """The folder that holds what was compiled."""
    folders = sorted({str(function.stats.cache_path) for function in _functions()} - {"None"})
    return os.path.commonpath(folders) if folders else ""
