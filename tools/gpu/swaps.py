"""Section of swaps: how fast a Manager moves blocks between the tiers, beside the link itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tools.gpu.clock import Budget, Spread
from tools.gpu.managers import (
    Shape,
    fill,
    in_turns,
    lacks_room,
    on,
    open_manager,
    randomise,
    run_case,
    size,
    vacate,
)
from tools.gpu.record import Bench, Row

if TYPE_CHECKING:
    import kvmem

KIB, MIB = 1 << 10, 1 << 20
OUT, IN, BOTH = "out", "in", "both at once"
WAYS = ("transfers_copied", "transfers_batched", "transfers_staged")


class Case(NamedTuple):
    """Blocks of one size; as many go out, come in, or both."""

    shape: Shape
    blocks: int  # of a set of sequences
    rows: int  # sequences of a set
    scattered: bool

    @property
    def moved_bytes(self) -> int:
        """Of one set, one way."""
        return self.blocks * self.shape.block_bytes

    @property
    def name(self) -> str:
        """As progress lines and reports say it."""
        lie = "scattered" if self.scattered else "in order"
        return f"{self.blocks:,} frames of {size(self.shape.block_bytes)} {lie}"


def shape_of(frame_bytes: int) -> Shape:
    """A model whose frames have as many bytes: of 64 KiB a layer, of 8 or 16 KiB the small ones."""
    heads = max(1, min(8, frame_bytes // (8 * KIB)))
    return Shape(layers=frame_bytes // (8 * KIB * heads), kv_heads=heads, heads=4 * heads)


def cases(quick: bool) -> list[Case]:
    """What says most comes first, for the time may run out."""
    total = (256 if quick else 1024) * MIB
    if quick:
        kinds = [(2 * MIB, True), (16 * KIB, True), (128 * KIB, True), (8 * MIB, True)]
    else:
        sizes = [2 * MIB, 16 * KIB, 128 * KIB, 8 * MIB, 512 * KIB, 32 * KIB, 64 * KIB, 256 * KIB,
                 MIB, 4 * MIB]  # fmt: skip
        kinds = [(one, True) for one in sizes] + [(2 * MIB, False), (16 * KIB, False)]
    found = []
    for frame_bytes, scattered in kinds:
        blocks = min(total // frame_bytes, 16384)
        found.append(Case(shape_of(frame_bytes), blocks, 16, scattered))
    return found


class Link:
    """Page-locked memory and memory of the GPU, and copies of one piece between them."""

    def __init__(self, bench: Bench, num_bytes: int) -> None:
        torch, real = bench.torch, bench.place != "cpu"
        self.bench, self.num_bytes = bench, num_bytes
        self.streams = [torch.cuda.Stream() if real else None for _ in range(2)]
        self.ends = {}
        for way in (OUT, IN):
            host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=real)
            gpu = torch.zeros(num_bytes, dtype=torch.uint8, device=bench.place)
            self.ends[way] = (host, gpu) if way == OUT else (gpu, host)
        self.rates: dict[str, float] = {}  # bytes a second
        self.cost_model: dict[str, Any] = {}  # of the last Manager

    def run(self, ways: tuple[str, ...], num_bytes: int) -> float:
        """Seconds of the host for as many bytes each way."""
        begin = self.bench.now()
        for way, stream in zip(ways, self.streams, strict=False):
            target, source = self.ends[way]
            with on(self.bench, stream):
                target[:num_bytes].copy_(source[:num_bytes], non_blocking=True)
        for stream in filter(None, self.streams):
            stream.synchronize()
        return self.bench.now() - begin

    def sides(self, num_bytes: int) -> dict[str, Callable[[], float]]:
        """Each way by itself, and both at once."""
        return {
            OUT: lambda: self.run((OUT,), num_bytes),
            IN: lambda: self.run((IN,), num_bytes),
            BOTH: lambda: self.run((OUT, IN), num_bytes),
        }

    def measure(self, seconds: float) -> None:
        """The rates of the link, a row each."""
        found = in_turns(self.bench, self.sides(self.num_bytes), seconds)
        for way, spread in found.items():
            moved = (2 if way == BOTH else 1) * self.num_bytes
            if isinstance(spread, Spread):
                self.rates[way] = moved / spread.median
            name = f"link: one copy of {size(self.num_bytes)} {way}"
            self.bench.keep(Row(name, {"bytes": self.num_bytes}, moved, spread))


class Sets:
    """Two sets of sequences, both on the GPU at rest; what a turn takes away the next brings back.

    The host tier gives up what comes back ("exclusive"), so that each way out is a copy.
    """

    def __init__(self, bench: Bench, case: Case) -> None:
        self.bench, self.case = bench, case
        blocks = 2 * case.blocks
        self.manager = open_manager(
            case.shape, blocks + 2 * case.rows, blocks, tier_policy="exclusive"
        )
        randomise(self.manager)
        tokens = case.blocks // case.rows * case.shape.block
        # Filled together: frames of one set lie between those of the other.
        seqs = fill(self.manager, 2 * case.rows, tokens, scattered=case.scattered)
        self.first, self.second = (
            (seqs[::2], seqs[1::2]) if case.scattered
            else (seqs[: case.rows], seqs[case.rows :])
        )  # fmt: skip
        self.heard: dict[str, list[float]] = {OUT: [], IN: []}  # seconds by the device's events
        self.told = 0  # transfers
        self.is_alone = True
        store = self.manager._runtime.store
        store.observers = (*store.observers, self._hear)

    def _hear(self, way: str, blocks: int, num_bytes: int, seconds: float) -> None:
        self.told += 1
        if self.is_alone:
            self.heard[way].append(seconds)

    def timed(self, *acts: Callable[[], kvmem.Transfer]) -> float:
        """Seconds of the host from the first call to the end of the last wait. Raises RuntimeError
        where not all blocks moved."""
        begin = self.bench.now()
        transfers = [act() for act in acts]
        for transfer in transfers:
            transfer.wait()
        spent = self.bench.now() - begin
        moved = [transfer.num_blocks for transfer in transfers]
        if moved != [self.case.blocks] * len(acts):
            raise RuntimeError(f"{moved} blocks moved; {self.case.blocks} each way were to")
        vacate(self.manager)
        told = self.told + len(acts)
        for _ in range(10_000):  # they have ended: it is a matter of asking their events
            if self.told >= told:
                break
            self.manager.stats()
        return spent

    def out(self) -> float:
        """The first set leaves."""
        return self.timed(lambda: self.manager.swap_out(self.first))

    def back(self) -> float:
        """It comes back."""
        return self.timed(lambda: self.manager.swap_in(self.first))

    def both(self) -> float:
        """The first set leaves while the second comes in, which left before."""
        self.is_alone = False
        self.timed(lambda: self.manager.swap_out(self.second))
        spent = self.timed(
            lambda: self.manager.swap_out(self.first), lambda: self.manager.swap_in(self.second)
        )
        self.back()
        self.is_alone = True
        return spent

    def facts(self) -> dict[str, Any]:
        """What was chosen, what is locked, what the cost model measured."""
        stats = self.manager.stats()
        device: Any = self.manager._runtime.store.device
        return {
            "frame_bytes": self.case.shape.block_bytes, "blocks": self.case.blocks,
            "scattered": self.case.scattered, "host_locked_bytes": stats.host_locked_bytes,
            "frames_a_run": {
                OUT: _frames_a_run(stats.bytes_out_done, stats.runs_out_done, self.case),
                IN: _frames_a_run(stats.bytes_in_done, stats.runs_in_done, self.case),
            },
            "cost_model": device.copies.model.figures(),
            **{way: getattr(stats, way) for way in WAYS},
        }  # fmt: skip

    def marks(self) -> list[Any]:
        """K of the last layer in each block, read in a step of one more token each, which then
        goes again: a table of all rows is at hand, and copies have arrived."""
        seqs = [*self.first, *self.second]
        self.manager.append(seqs, [1] * len(seqs))
        columns = self.case.blocks // self.case.rows
        kept: Any = None
        with self.manager.step(seqs) as step:
            frames = step.block_table[:, :columns].to(self.bench.place).long()
            kept = self.manager.kv(self.case.shape.layers - 1)[0][frames].clone()
        self.manager.truncate(seqs, [seq.num_tokens - 1 for seq in seqs])
        return kept


def _frames_a_run(num_bytes: int, num_runs: int, case: Case) -> float:
    """Frames that follow each other in both tiers, on average."""
    return num_bytes / case.shape.block_bytes / max(num_runs, 1)


def swap(bench: Bench, budget: Budget) -> str:
    """swap_out, swap_in and both at once by the size of a frame, each beside one copy."""
    chosen = cases(bench.quick)
    link = Link(bench, max(case.moved_bytes for case in chosen))
    link.measure(2 * bench.case_seconds)
    for case in chosen:
        # Two sets, and the arena's own copy of nothing: the rest is the host's.
        needed = (2 * case.blocks + 2 * case.rows + 2) * case.shape.block_bytes
        if not lacks_room(bench, budget, case.name, needed):
            run_case(bench, budget, case.name, lambda case=case: swap_case(bench, link, case))
    rates = ", ".join(f"{way} {rate / 1e9:,.1f} GB/s" for way, rate in link.rates.items())
    return (
        f"the link: {rates}; {model_words(link.cost_model)}; times of the host from the call to "
        "the end of wait(), which looks at the device at least every millisecond"
    )


def model_words(figures: dict[str, Any]) -> str:
    """What the cost model chooses by (`CostModel.figures`)."""
    ways = []
    for direction in (OUT, IN):
        for way, costs in figures.get(direction, {}).items():
            if costs is None:
                ways.append(f"{direction} {way} not there")
                continue
            rate = costs["gb_per_second"]
            ways.append(
                f"{direction} {way} {costs['per_call_us']:.3g} us a call, "
                f"{costs['per_run_us']:.3g} us a run"
                + (f", {rate:.3g} GB/s" if rate is not None else "")
            )
    return f"cost model ({figures.get('source', 'none')}): {'; '.join(ways)}"


def swap_case(bench: Bench, link: Link, case: Case) -> None:
    """Three rows: out, in, both at once."""
    sets = Sets(bench, case)
    with sets.manager:
        before = sets.marks()
        copies = link.sides(case.moved_bytes)
        ours = {OUT: sets.out, IN: sets.back, BOTH: sets.both}
        found = in_turns(
            bench,
            ours | {f"copy {way}": copies[way] for way in ours},
            bench.case_seconds,
        )
        whole = all(isinstance(found[way], Spread) for way in ours)
        wrong = int((sets.marks() != before).sum()) if whole else 0  # else the reasons say more
        facts = sets.facts()
        link.cost_model = facts["cost_model"]
        for way in ours:
            bench.keep(_row(case, way, found, facts, sets.heard.get(way, []), link, wrong))


def _row(
    case: Case, way: str, found: dict[str, Spread | str], facts: dict[str, Any],
    heard: list[float], link: Link, wrong: int,
) -> Row:  # fmt: skip
    """One way, as a share of what the link gave in this run."""
    moved = (2 if way == BOTH else 1) * case.moved_bytes
    chosen = ", ".join(
        f"{facts[name]} {name.removeprefix('transfers_')}" for name in WAYS if facts[name]
    )
    runs = [f"{frames:.3g} {side}" for side, frames in facts["frames_a_run"].items()]
    locked = size(facts["host_locked_bytes"])
    note = f"transfers: {chosen}; {locked} locked; frames a run: {', '.join(runs)}"
    if heard:
        middle = sorted(heard)[len(heard) // 2]
        note = f"by the device's events {1e3 * middle:.3g} ms; {note}"
        facts = facts | {"device_seconds": middle}
    copied = found.get(f"copy {way}", "no figure")
    row = Row(
        f"{way}: {case.name}", facts, moved, found.get(way, "no figure"),
        {"one copy": copied}, error=float(wrong), allowed_error=0.0, note=note,
    )  # fmt: skip
    if isinstance(row.ours, Spread) and way in link.rates:
        row.limit, row.share = f"the link {way}", moved / row.ours.median / link.rates[way]
    return row
