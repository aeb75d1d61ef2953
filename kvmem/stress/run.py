"""A stress run: threads on one Manager, a watchdog over them, and what is left at the end.

The calling thread only watches: it never calls a Manager that might hang, tells the progress once a
second, and takes Ctrl-C. A Manager that an injected fault failed is closed, and a new one goes on;
a simulated device is changed now and then for one that behaves in another way.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

import numpy as np

from kvmem.config import Config
from kvmem.errors import DeviceUnavailable, KVMemError, ManagerClosed, TransferError
from kvmem.manager import Manager
from kvmem.stats import Stats
from kvmem.stress.breach import Breach, breach_of, fault_of
from kvmem.stress.ending import Ending
from kvmem.stress.leaks import LeakWatch
from kvmem.stress.options import StressOptions
from kvmem.stress.report import GIGA, StressProgress, StressReport
from kvmem.stress.stamps import Stamps
from kvmem.stress.workload import NUM_PREFIXES, Worker, drawn_tokens
from kvmem.warming import warmup

MAX_BREACHES = 8  # kept; the first stops the run, but others may be on their way
#: Operations on one simulated device, of all threads: the next behaves in another way.
SIM_OPERATIONS = 1000
_LOOK_EVERY = 32  # operations of a thread between two looks at the counters
_TICK = 0.1  # seconds between two looks of the watchdog
_STOP_WITHIN = 2.0  # seconds that threads get to end when the run is given up
_CLOSE_WITHIN = 10.0
_POLL_EVERY = 0.0005

Tell = Callable[[StressProgress], None]


def run_stress(options: StressOptions, *, progress: Tell | None = None) -> StressReport:
    """Run it to its end, its first breach, or Ctrl-C (KeyboardInterrupt, when all has ended).

    ``progress`` is called about once a second, in the calling thread. Compiles first what a Manager
    calls (a minute where nothing is cached); that time is not counted. Raises TypeError,
    ConfigError where the arenas don't fit the machine. It sets the switch interval of the process
    where the options ask for it, and restores it.
    """
    if not isinstance(options, StressOptions):
        raise TypeError(f"options must be a StressOptions, not {type(options).__name__}")
    warmup(
        Config(
            num_layers=1,
            num_kv_heads=options.num_kv_heads,
            head_dim=options.head_dim,
            dtype=options.dtype,
            kv_dtype=options.kv_dtype,
            device_blocks=1,
        )
    )
    if options.device.startswith("cuda"):  # what a GPU's context keeps open is no leak of ours
        Manager(options.config(0)).close()
    before = sys.getswitchinterval()
    run = _Run(options, progress)
    try:
        if options.switch_interval is not None:
            sys.setswitchinterval(options.switch_interval)
        return run.whole()
    finally:
        sys.setswitchinterval(before)


class _Run:
    """One run. Threads write their own Worker, and ``_fail`` under a lock; the rest is the
    caller's."""

    def __init__(self, options: StressOptions, progress: Tell | None) -> None:
        self._options, self._progress = options, progress
        self.report = StressReport(options)
        stamps = Stamps(
            num_layers=options.num_layers,
            num_kv_heads=options.num_kv_heads,
            head_dim=options.head_dim,
            longest=options.max_tokens,
        )
        drawn = np.random.default_rng([options.seed, 2**32])
        prefixes = [drawn_tokens(drawn, options.max_tokens) for _ in range(NUM_PREFIXES)]
        count = options.threads
        self._workers = [
            Worker(i, options, stamps, prefixes, _share(options.sequences, count, i))
            for i in range(count)
        ]
        self._stop = threading.Event()  # the run is to end
        self._over = threading.Event()  # this Manager is to end
        self._abandoned = False  # it was closed under the threads that use it
        self._lock = threading.Lock()
        self._latest: Stats | None = None  # of the current Manager
        self._loads: list[list[int]] = [[0, 0] for _ in range(count)]  # blocks of the live, looks
        self._begin = self._told = 0.0
        self._before = (0, 0, 0)  # operations, bytes out, bytes in: when last told

    def whole(self) -> StressReport:
        """All Managers, one after the other."""
        leaks = LeakWatch(self.report.leaks)
        self._leak_watch = leaks
        self._begin = self._told = time.monotonic()
        while not self._is_done():
            manager = Manager(self._options.config(self.report.managers))
            self.report.managers += 1
            self._one(manager)
        self.report.seconds = time.monotonic() - self._begin
        self._sum_up()
        leaks.end()
        return self.report

    # --- one Manager ----------------------------------------------------------------------------

    def _one(self, manager: Manager) -> None:
        """Work on it until the run ends or it fails; then read and drain it, and close it."""
        self._over.clear()
        self._latest = None
        for worker in self._workers:
            worker.begin(manager)
        threads: list[_Thread] = []
        pollers: list[_Thread] = []
        try:
            for worker in self._workers:
                threads.append(_Thread(f"stress-{worker.number}", self._work, worker))
            if self._options.device == "sim" and len(threads) > 1:
                pollers.append(_Thread("stress-poll", self._poll, manager))
            ended = self._watch(threads, lambda: sum(w.num_begun for w in self._workers))
            if ended and self._goes_on():
                ending = Ending(manager, self._workers, self.report.leaks)
                threads.append(_Thread("stress-end", self._end, ending))
                ended = self._watch(threads[-1:], lambda: ending.num_begun)
        except BaseException:
            self._give_up(manager, threads + pollers)
            raise
        if not ended:
            self._give_up(manager, threads + pollers)
            return
        self._over.set()
        _join(pollers, _STOP_WITHIN)
        if self._latest is not None:
            self.report.add(self._latest)
            self._latest = None
        manager.close()

    def _work(self, worker: Worker) -> None:
        options, number = self._options, worker.number
        last: float = math.inf  # operation on this Manager
        if options.ops is not None:
            last = _share(options.ops, options.threads, number)
        if options.device == "sim":
            turn = _share(SIM_OPERATIONS, options.threads, number)
            last = min(last, worker.num_begun + turn)
        while not (self._stop.is_set() or self._over.is_set() or worker.num_begun >= last):
            self._guarded(worker.operate, worker)
            worker.count_checked()
            if worker.num_begun % _LOOK_EVERY == 0:
                self._guarded(lambda: self._look(worker), worker)

    def _end(self, ending: Ending) -> None:
        first = self._workers[0]
        self._guarded(ending.run, first)
        for worker in self._workers:
            worker.count_checked()
        if self._goes_on():
            self._guarded(lambda: self._look(first), first)

    def _poll(self, manager: Manager) -> None:
        """Let the streams of a simulated device go on in a thread of their own."""
        while not self._over.wait(_POLL_EVERY):
            try:
                manager.poll()
            except TransferError:
                continue  # a worker is told as well, or finds its tokens pending again
            except KVMemError:
                return

    def _look(self, worker: Worker) -> None:
        load = self._loads[worker.number]
        load[0] += worker.live_blocks()
        load[1] += 1
        if worker.number == 0:
            self._latest = worker.m.stats()

    def _guarded(self, act: Callable[[], None], worker: Worker) -> None:
        """Call it, and sort what it raises: an injected fault, the end of a Manager, a breach."""
        try:
            act()
        except Exception as error:
            if self._abandoned and isinstance(error, ManagerClosed | TransferError):
                return
            site = fault_of(error, injected=self._options.faults > 0)
            if site is None:
                self._fail(breach_of(error, worker.number))
            elif not isinstance(error, DeviceUnavailable):
                worker.faults[site] += 1
                worker.num_lost += len(getattr(error, "lost", ()))
            else:
                with self._lock:  # all threads see it, once it counts
                    if not self._over.is_set():
                        worker.faults[site] += 1
                    self._over.set()

    def _fail(self, breach: Breach) -> None:
        """Note a breach and stop all."""
        with self._lock:
            if not self.report.breaches:
                ops = sum(w.num_begun for w in self._workers)
                self.report.replay = self._options.command(ops=max(1, ops))
            if len(self.report.breaches) < MAX_BREACHES:
                self.report.breaches.append(breach)
        self._stop.set()
        self._over.set()

    def _goes_on(self) -> bool:
        """Whether the Manager is neither failed nor given up."""
        return not self._over.is_set() and not self.report.breaches

    def _is_done(self) -> bool:
        ops = self._options.ops
        begun = sum(w.num_begun for w in self._workers)
        return self._stop.is_set() or (ops is not None and begun >= ops)

    # --- watching -------------------------------------------------------------------------------

    def _watch(self, threads: Sequence[_Thread], begun: Callable[[], int]) -> bool:
        """Wait for the threads; False when none of them got anywhere for ``hang_seconds``."""
        last, since = -1, time.monotonic()
        while alive := [thread for thread in threads if not thread.done.is_set()]:
            alive[0].done.wait(_TICK)
            now, count = time.monotonic(), begun()
            if count != last:
                last, since = count, now
            elif now - since > self._options.hang_seconds:
                self._fail(_hang(alive, now - since))
                return False
            seconds = self._options.seconds
            if seconds is not None and now - self._begin >= seconds:
                self._stop.set()
            if now - self._told >= 1:
                self._tell(now)
        return True

    def _give_up(self, manager: Manager, threads: Sequence[_Thread]) -> None:
        """End what hangs or was interrupted, in bounded time: closing wakes who waits."""
        self._stop.set()
        self._over.set()
        _join(threads, _STOP_WITHIN)
        self._abandoned = True
        _join([_Thread("stress-close", manager.close)], _CLOSE_WITHIN)
        _join(threads, _STOP_WITHIN)

    def _tell(self, now: float) -> None:
        self._leak_watch.sample()
        if self._progress is None:
            self._told = now
            return
        counted, latest = self.report.counted, self._latest

        def total(name: str) -> int:
            return counted[name] + (0 if latest is None else int(getattr(latest, name)))

        ops = sum(w.num_begun for w in self._workers)
        sums = (ops, total("bytes_out_done"), total("bytes_in_done"))
        rates = [max(0, a - b) / (now - self._told) for a, b in zip(sums, self._before)]
        self._told, self._before = now, sums
        self._progress(
            StressProgress(
                seconds=now - self._begin,
                operations=ops,
                operations_per_second=rates[0],
                swaps=total("swap_outs") + total("swap_ins"),
                gb_per_second_out=rates[1] / GIGA,
                gb_per_second_in=rates[2] / GIGA,
                faults=sum(sum(w.faults.values()) for w in self._workers),
                breaches=len(self.report.breaches),
            )
        )

    def _sum_up(self) -> None:
        """Add up what the threads have counted."""
        report = self.report
        for worker in self._workers:
            report.operations += worker.operations
            report.refusals += worker.refusals
            report.faults += worker.faults
            report.sequences_lost += worker.num_lost
            report.sequences += worker.num_sequences
            report.tokens += worker.num_tokens
            report.rows_checked += worker.rows_checked
            report.attentions_checked += worker.attentions_checked
        blocks = sum(total / max(1, looks) for total, looks in self._loads)
        report.pressure = blocks / self._options.config(0).device_blocks
        if not report.replay:
            report.replay = self._options.command()


def _share(total: int, count: int, index: int) -> int:
    """The part of ``total`` that the ``index``-th of ``count`` gets."""
    return total // count + (index < total % count)


class _Thread(threading.Thread):
    """Started; `done` is set at the end of what it does. A daemon: one that hangs must not keep the
    process from its end.

    Waited for by `done`, not by `join`: a `join` that Ctrl-C interrupts takes the thread for ended
    (Python 3.11 and 3.12), and the process would end under it.
    """

    def __init__(self, name: str, act: Callable[..., None], *arguments: object) -> None:
        super().__init__(name=name, daemon=True)
        self._act, self._arguments = act, arguments
        self.done = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            self._act(*self._arguments)
        finally:
            self.done.set()


def _join(threads: Sequence[_Thread], seconds: float) -> None:
    """Wait for all of them together for at most so long."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        if thread.done.wait(max(0.0, deadline - time.monotonic())):
            thread.join()


def _hang(threads: Sequence[_Thread], seconds: float) -> Breach:
    """The breach of threads that got nowhere, with the stack of each."""
    frames = sys._current_frames()
    stacks = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        lines = traceback.format_stack(frame) if frame is not None else ["it has just ended\n"]
        stacks.append(f"{thread.name}:\n{''.join(lines)}")
    names = ", ".join(thread.name for thread in threads)
    message = f"no operation of {names} ended for {seconds:.0f} s"
    return Breach("hang", message, detail="\n".join(stacks))
