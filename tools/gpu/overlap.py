"""Sections of work at the same time: decode beside swaps, layers that arrive while others compute,
and a decode step as a CUDA graph beside plain launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tools.gpu.clock import Budget, Spread, measure
from tools.gpu.kv import ALLOWED_ERROR
from tools.gpu.managers import (
    ROOM,
    Decoder,
    Shape,
    fill,
    in_turns,
    open_manager,
    randomise,
    run_case,
    size,
    synchronize,
    vacate,
)
from tools.gpu.record import Bench, Row

if TYPE_CHECKING:
    import kvmem

#: Blocks of each sequence for the tokens that turns append.
SPARE = 8


class Load(NamedTuple):
    """A batch that decodes, and what moves meanwhile."""

    shape: Shape
    batch: int
    context: int
    moved_blocks: int = 0  # each way at a time

    @property
    def row_blocks(self) -> int:
        """Of a sequence, room for new tokens included."""
        return -(-self.context // self.shape.block) + SPARE

    def fitted(self, free: int) -> Load:
        """With as many rows as there is memory for; with none the Manager will say so."""
        rest = free - ROOM - 2 * self.moved_blocks * self.shape.block_bytes
        most = rest // (self.row_blocks * self.shape.block_bytes)
        return self._replace(batch=max(1, min(self.batch, most)))

    @property
    def name(self) -> str:
        """As progress lines and reports say it."""
        return f"{self.batch} x {self.context:,}, {self.shape.name}"


def loads(quick: bool) -> dict[str, Load]:
    """What each section works on; 512 MiB take the link longer than a step takes."""
    gib_of_blocks = (1 << 30) // Shape().block_bytes
    return {
        "beside": Load(Shape(), 32, 4096, gib_of_blocks // 2),
        "layers": Load(Shape(), 4 if quick else 16, 2048),
        "graph": Load(Shape(), 32, 4096 if not quick else 1024),
        "graph, small": Load(Shape(), 8, 512),
    }


class Traffic:
    """Two sets of sequences on one Manager: one leaves while the other comes in, again and again.

    The host tier gives up what comes back ("exclusive"), so each way out is a copy.
    """

    def __init__(self, manager: kvmem.Manager, blocks: int) -> None:
        self.manager, rows = manager, min(4, blocks)
        tokens = blocks // rows * manager.config.block_size
        self.here, self.away = (fill(manager, rows, tokens) for _ in range(2))
        manager.swap_out(self.away).wait()
        self.blocks = rows * (blocks // rows)
        self.transfers: list[kvmem.Transfer] = []
        self.begun = self.looks = self.busy = 0

    def pump(self) -> None:
        """Begin the next exchange if the last one has ended."""
        self.looks += 1
        if not all(transfer.done for transfer in self.transfers):
            self.busy += 1
            return
        vacate(self.manager)
        self.transfers = [self.manager.swap_out(self.here), self.manager.swap_in(self.away)]
        self.here, self.away = self.away, self.here
        self.begun += 1
        moved = [transfer.num_blocks for transfer in self.transfers]
        if moved != [self.blocks] * 2:
            raise RuntimeError(f"{moved} blocks on the way; {self.blocks} each way were to move")

    def drain(self) -> None:
        """Wait for what is on the way."""
        for transfer in self.transfers:
            transfer.wait()
        self.transfers = []


def beside(bench: Bench, budget: Budget) -> str:
    """A decode step alone, and while blocks go out and come in all the time."""
    load = loads(bench.quick)["beside"].fitted(bench.free_bytes())
    run_case(bench, budget, f"decode beside swaps, {load.name}", lambda: beside_case(bench, load))
    return (
        "wall time of a step as an engine has it: append, plan, launches, wait for its last "
        "kernel; the next exchange of blocks is asked for while the GPU works"
    )


def beside_case(bench: Bench, load: Load) -> None:
    """One row: the step beside swaps, and the step alone."""
    blocks = load.moved_blocks
    manager = open_manager(
        load.shape, load.batch * load.row_blocks + 2 * blocks, 2 * blocks, tier_policy="exclusive"
    )
    with manager:
        randomise(manager)
        decoder = Decoder(bench, manager, load.shape, fill(manager, load.batch, load.context))
        traffic = Traffic(manager, blocks)

        def alone() -> float:
            traffic.drain()
            return decoder.step()

        def swapping() -> float:
            traffic.pump()  # the first of them; others follow as they end
            return decoder.step(traffic.pump)

        before = manager.stats()
        # Turns of both sides append to the same sequences.
        most = min(25, (SPARE * load.shape.block - 2) // 2)
        found = in_turns(
            bench, {"alone": alone, "swapping": swapping}, 4 * bench.case_seconds, most_turns=most
        )
        traffic.drain()
        after = manager.stats()
    moved = load.shape.block_bytes * load.row_blocks * load.batch
    launching = sorted(decoder.launching)[len(decoder.launching) // 2]
    ours, plain = found["swapping"], found["alone"]
    row = Row(
        f"decode beside swaps, {load.name}",
        {
            "batch": load.batch, "context": load.context, "exchanges": traffic.begun,
            "looks": traffic.looks, "busy": traffic.busy, "launching_seconds": launching,
            "bytes_out": after.bytes_out - before.bytes_out,
            "bytes_in": after.bytes_in - before.bytes_in,
        },
        moved, ours, {"alone": plain},
        note=f"{traffic.begun} exchanges of {size(blocks * load.shape.block_bytes)} each way, "
             f"still going at {traffic.busy} of {traffic.looks} looks; launched in "
             f"{1e3 * launching:.3g} ms",
    )  # fmt: skip
    if isinstance(ours, Spread) and isinstance(plain, Spread):
        row.limit, row.share = "the step alone", plain.median / ours.median
        row.facts["slow_down"] = ours.median / plain.median - 1
        row.note = f"slower by {row.facts['slow_down']:.1%} (aim: at most 3 %); {row.note}"
    bench.keep(row)


class Layered:
    """Sequences that come in, and a step over them whose layers compute about as long as they take
    to arrive: attention, and products as of a model's other parts."""

    def __init__(self, bench: Bench, load: Load, width: int = 4096, tokens: int = 1024) -> None:
        torch = bench.torch
        blocks = load.batch * load.row_blocks
        self.bench, self.load = bench, load
        self.manager = open_manager(load.shape, blocks, blocks)
        randomise(self.manager)
        self.seqs = fill(self.manager, load.batch, load.context)
        self.decoder = Decoder(bench, self.manager, load.shape, self.seqs)
        kind = {"dtype": torch.bfloat16, "device": bench.place}
        self.rows = torch.randn((tokens, width), **kind)
        self.weights = torch.randn((width, width), **kind)
        self.products = 1

    def calibrate(self) -> float:
        """Choose how many products take as long as a layer's arrival; seconds of all layers."""
        arrival = self.alone()  # a warm-up
        arrival = self.alone() / self.load.shape.layers
        one = measure(self.bench.clock, {"": lambda turn: self.rows @ self.weights}, seconds=0.1)
        spread = one[""]
        if isinstance(spread, Spread):
            self.products = max(1, min(200, round(arrival / max(spread.median, 1e-7))))
        return arrival * self.load.shape.layers

    def away(self) -> None:
        """They leave; what the host has already is not copied again."""
        self.manager.swap_out(self.seqs).wait()
        vacate(self.manager)

    def compute(self) -> None:
        """A step of one more token each, the products of each layer behind its attention."""
        self.decoder.append()
        with self.manager.step(self.seqs) as step:
            for layer in range(self.load.shape.layers):
                self.decoder.layer(step, layer)
                for _ in range(self.products):
                    self.rows @ self.weights
        synchronize(self.bench)

    def alone(self) -> float:
        """The arrival alone."""
        self.away()
        begin = self.bench.now()
        transfer = self.manager.swap_in(self.seqs)
        transfer.wait()
        spent = self.bench.now() - begin
        self._check(transfer)
        return spent

    def computing(self) -> float:
        """The computing alone, all layers there."""
        begin = self.bench.now()
        self.compute()
        return self.bench.now() - begin

    def arriving(self, by_layer: int | None) -> float:
        """Both: layers as they come, or all behind the last."""
        self.away()
        begin = self.bench.now()
        transfer = self.manager.swap_in(self.seqs, by_layer=by_layer)
        self.compute()
        spent = self.bench.now() - begin
        transfer.wait()
        self._check(transfer)
        return spent

    def _check(self, transfer: kvmem.Transfer) -> None:
        least = self.load.batch * (self.load.context // self.load.shape.block)
        if transfer.num_blocks < least:
            raise RuntimeError(f"{transfer.num_blocks} blocks came in; {least} were away")


def layers(bench: Bench, budget: Budget) -> str:
    """swap_in by layers beside swap_in as a whole, and the limits of both."""
    load = loads(bench.quick)["layers"].fitted(bench.free_bytes())
    run_case(bench, budget, f"swap_in and a step, {load.name}", lambda: layers_case(bench, load))
    return "the limits: the larger of arrival and computing, and for one after the other their sum"


def layers_case(bench: Bench, load: Load, **sizes: int) -> None:
    """A row for each way in."""
    work = Layered(bench, load, **sizes)
    with work.manager:
        work.calibrate()
        ways: list[int | None] = [n for n in (1, 4, 8) if n <= load.shape.layers]
        sides: dict[str, Callable[[], float]] = {
            # Bound now: a loop's name would be the last one's.
            _way(n): (lambda n=n: work.arriving(n))  # type: ignore[misc]
            for n in [*ways, None]
        }
        sides |= {"arrival alone": work.alone, "computing alone": work.computing}
        most = min(15, SPARE * load.shape.block // len(sides) - 2)
        found = in_turns(bench, sides, 4 * bench.case_seconds, most_turns=most)
    arrival, computing = found["arrival alone"], found["computing alone"]
    whole = found[_way(None)]
    moved = load.batch * load.context // load.shape.block * load.shape.block_bytes
    facts = {"batch": load.batch, "context": load.context, "products": work.products}
    for n in [*ways, None]:
        others = {"arrival alone": arrival, "computing alone": computing}
        if n is not None:
            others = {"as a whole": whole, **others}
        row = Row(f"swap_in {_way(n)}, {load.name}", facts, moved, found[_way(n)], others)
        both = isinstance(arrival, Spread) and isinstance(computing, Spread)
        if both and isinstance(row.ours, Spread):
            larger = max(arrival.median, computing.median)
            row.limit, row.share = "the larger of both", larger / row.ours.median
            row.note = (
                f"the larger of both {1e3 * larger:.3g} ms, their sum "
                f"{1e3 * (arrival.median + computing.median):.3g} ms"
            )
        bench.keep(row)


def _way(by_layer: int | None) -> str:
    return "as a whole" if by_layer is None else f"by {by_layer} layers"


class Graphed:
    """A decode step whose tensors lie in fixed buffers, captured at its first run and replayed."""

    def __init__(self, bench: Bench, decoder: Decoder, context: int) -> None:
        self.bench, self.decoder = bench, decoder
        manager: Any = decoder.manager
        count = len(decoder.seqs)
        self.buffers = manager.graph_buffers(count, count, context)
        self.graph: Any = None

    def step(self) -> float:
        """As `Decoder.step`; the first one captures."""
        manager: Any = self.decoder.manager
        begin = self.bench.now()
        self.decoder.append()
        with manager.step(self.decoder.seqs, into=self.buffers) as step:
            if self.bench.place == "cpu":
                self.decoder.layers(step)
            else:
                self.graph = self.graph or self._captured(step)
                self.graph.replay()
        synchronize(self.bench)
        return self.bench.now() - begin

    def _captured(self, step: kvmem.Step) -> Any:
        """After a run that loads kernels; the replay writes again what it wrote."""
        cuda = self.bench.torch.cuda
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            self.decoder.layers(step)
        cuda.current_stream().wait_stream(side)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            self.decoder.layers(step)
        return graph

    def difference(self) -> tuple[float, float]:
        """Largest difference of a replay's result from that of plain launches for the very same
        tokens, and what is allowed."""
        seqs, manager = self.decoder.seqs, self.decoder.manager
        self.step()
        replayed = self.decoder.out.float().clone()
        manager.truncate(seqs, [seq.num_tokens - 1 for seq in seqs])
        self.decoder.out.zero_()
        self.decoder.step()
        plain = self.decoder.out.float()
        return float((replayed - plain).abs().max()), ALLOWED_ERROR * float(plain.abs().max())


def graph(bench: Bench, budget: Budget) -> str:
    """A decode step by plain launches and by the replay of a CUDA graph."""
    import kvmem

    if not hasattr(kvmem.Manager, "graph_buffers"):
        return "not in this version: kvmem.Manager has no graph_buffers"
    for name in ("graph, small", "graph"):
        load = loads(bench.quick)[name].fitted(bench.free_bytes())
        label = f"a step replayed, {load.name}"
        run_case(bench, budget, label, lambda load=load: graph_case(bench, load))  # type: ignore[misc]
    return "wall time of a step: append, plan, upload, launches or replay, wait for its last kernel"


def graph_case(bench: Bench, load: Load) -> None:
    """One row: replay beside plain launches, their results compared."""
    manager = open_manager(load.shape, load.batch * load.row_blocks)
    with manager:
        randomise(manager)
        decoder = Decoder(bench, manager, load.shape, fill(manager, load.batch, load.context))
        graphed = Graphed(bench, decoder, load.row_blocks * load.shape.block)
        error, allowed = graphed.difference()
        most = min(25, (SPARE * load.shape.block - 8) // 2)
        found = in_turns(
            bench, {"replay": graphed.step, "plain launches": decoder.step},
            2 * bench.case_seconds, most_turns=most,
        )  # fmt: skip
    moved = load.shape.block_bytes * load.row_blocks * load.batch
    bench.keep(
        Row(
            f"a step replayed, {load.name}", {"batch": load.batch, "context": load.context}, moved,
            found.pop("replay"), found, error=error, allowed_error=allowed,
        )
    )  # fmt: skip
