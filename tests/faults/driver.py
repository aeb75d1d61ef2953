"""A seeded random workload on a real Manager that notices when a rule breaks.

Every token's K/V is a stamp of its whole prefix and namespace, so that any wrong reuse shows when
it is read. Copy streams are held at random and let go only for what a plan says it waits for: a
forgotten fence reads what has not arrived. `verify()` runs after each operation, and a plain model
of tokens, drafts and priorities is compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import kvmem
from kvmem.store.device import Stream
from tests.faults.steps import Steps
from tests.faults.world import COPY_STREAMS, NAMESPACES, Broken, Known, Setup, require


class Driver(Steps):
    """Random operations on one Manager, from one seed."""

    # --- running ----------------------------------------------------------------------------------

    def run(self) -> None:
        """All operations, then the end; raises at the first breach."""
        ops = self.operations()
        weights = [w for _, w in ops]
        for _ in range(self.setup.num_ops):
            op = ops[self.rng.choices(range(len(ops)), weights)[0]][0]
            self.log.append(op.__name__)
            op()
            self.check()
        self.finish()

    def close(self) -> None:
        """End the Manager whatever its state."""
        for opened in self.opened:
            opened.step._ended = True
        for pin in self.pins:
            pin._released = True
        self.m.close()

    def operations(self) -> list[tuple[Callable[[], None], int]]:
        """What can happen, with how often."""
        return [
            (self.op_create, 10), (self.op_append, 12), (self.op_draft, 5), (self.op_accept, 6),
            (self.op_step, 30), (self.op_end_step, 8), (self.op_fork, 5), (self.op_truncate, 5),
            (self.op_free, 6), (self.op_swap_out, 8), (self.op_swap_in, 4), (self.op_prefetch, 2),
            (self.op_bounce, 3), (self.op_exchange, 6), (self.op_make_room, 5),
            (self.op_pin, 4), (self.op_unpin, 4), (self.op_evict, 4),
            (self.op_match, 4), (self.op_hold, 6), (self.op_settle, 6), (self.op_reset, 2),
        ]  # fmt: skip

    # --- sequences --------------------------------------------------------------------------------

    def op_create(self) -> None:
        if len(self.known) >= 6:
            return
        rng = self.rng
        prefix = rng.choice(self.prefixes)[: rng.choice((2, 4, 4, 6, 8, 12))]
        tokens = prefix + [rng.randrange(2) for _ in range(rng.choice((0, 0, 1, 2, 3)))]
        namespace = rng.choice((None, None, "tenant"))
        publish = rng.random() < 0.9
        seq = self.m.create(
            tokens, namespace=namespace, priority=rng.choice((0, 0, 1)), publish=publish
        )
        require(seq.num_cached <= len(tokens), "create forecasts more than there is")
        self.known[seq.id] = Known(seq, namespace, tokens, publish=publish)

    def op_append(self) -> None:
        for k in self.pick(3):
            if k.drafts == 0 and len(k.tokens) < 20:
                tokens = [self.rng.randrange(2) for _ in range(self.rng.choice((1, 1, 2)))]
                self.m.append([k.seq], tokens, counts=[len(tokens)])
                k.tokens += tokens

    def op_draft(self) -> None:
        for k in self.pick(1):
            if len(k.tokens) < 18:
                tokens = [self.rng.randrange(2) for _ in range(self.rng.randint(1, 4))]
                self.m.append([k.seq], tokens, counts=[len(tokens)], draft=True)
                k.tokens += tokens
                k.drafts += len(tokens)

    def op_accept(self) -> None:
        drafted = [k for k in self.live() if k.drafts]
        if not drafted:
            return
        k = self.rng.choice(drafted)
        kept = self.rng.randint(0, k.drafts)
        token = self.rng.randrange(2)
        self.m.accept([k.seq], [kept], [token])
        k.tokens = [*k.tokens[: len(k.tokens) - k.drafts + kept], token]
        k.drafts = 0

    def op_fork(self) -> None:
        for k in self.pick(1):
            if len(self.known) < 6:
                (child,) = self.m.fork(k.seq)
                self.known[child.id] = Known(
                    child, k.namespace, list(k.tokens), k.drafts, k.publish
                )

    def op_truncate(self) -> None:
        for k in self.pick(1):
            length = self.rng.randint(max(1, len(k.tokens) - 5), len(k.tokens))
            k.drafts = max(0, k.drafts - (len(k.tokens) - length))
            k.tokens = k.tokens[:length]
            self.m.truncate([k.seq], length)

    def op_free(self) -> None:
        live = self.live(free_only=self.rng.random() < 0.8)
        if not live:
            return
        k = self.rng.choice(live)
        for opened in self.opened:
            if any(s.id == k.seq.id for s in opened.step.seqs):
                opened.freed[k.seq.id] = k
        self.m.free([k.seq])
        del self.known[k.seq.id]

    # --- tiers ------------------------------------------------------------------------------------

    def op_swap_out(self) -> None:
        chosen = self.pick(2)
        how = self.rng.choice(("swap", "swap", "swap", "auto", "recompute"))
        self.swap_out(chosen, how)

    def swap_out(self, chosen: list[Known], how: str) -> kvmem.Transfer | None:
        """Swap out; refused only for want of host room, and then nothing changed (R8)."""
        seqs = [k.seq for k in chosen]
        arrays = self.arrays()
        try:
            transfer = self.m.swap_out(seqs, how)
        except (kvmem.OutOfBlocks, kvmem.TierError):
            require(how == "swap", f"how={how} raised")
            self.unchanged(arrays, "swap_out")
            return None
        for k in chosen:
            require(k.seq.state != "RESIDENT", f"sequence {k.seq.id} is still RESIDENT")
        return transfer

    def op_swap_in(self) -> None:
        seqs = [k.seq for k in self.pick(2)]
        arrays = self.arrays()
        try:
            self.m.swap_in(seqs)
        except kvmem.OutOfBlocks:
            self.unchanged(arrays, "swap_in")
            return
        require(all(s.state != "SWAPPED" for s in seqs), "swap_in left one SWAPPED")

    def op_prefetch(self) -> None:
        self.m.prefetch([k.seq for k in self.pick(3)])

    def op_exchange(self) -> None:
        """One comes in and another goes out, perhaps into host frames still being read."""
        swapped = [k for k in self.live() if k.seq.state == "SWAPPED"]
        resident = [k for k in self.live() if k.seq.state == "RESIDENT"]
        if swapped and resident:
            if self.rng.random() < 0.6:  # the copies in are held, those out are not
                self.hold_only(Stream.IN)
            try:
                self.m.swap_in([self.rng.choice(swapped).seq])
            except kvmem.OutOfBlocks:
                return
            self.swap_out([self.rng.choice(resident)], "swap")

    def op_bounce(self) -> None:
        """Out, in, out again: the second time every block is clean and nothing moves, except under
        exclusive, where nothing is in both tiers."""
        resident = [k for k in self.live() if k.seq.state == "RESIDENT"]
        if not resident:
            return
        k = self.rng.choice(resident)
        if self.setup.hold_out:
            self.hold_only(Stream.OUT)
        if self.swap_out([k], "swap") is None:
            return
        if self.setup.hold_out:
            self.m.evict(self.setup.device_blocks)
        try:
            self.m.swap_in([k.seq])
        except kvmem.OutOfBlocks:
            return
        if self.setup.hold_out:
            return  # stays, to be read by the next step
        again = self.swap_out([k], "swap")
        if self.setup.tier_policy == "exclusive":
            return
        require(again is not None, "a clean sequence needs no host room")
        assert again is not None
        clean = again.num_blocks == 0 or self.num_failed > 0  # a failed copy leaves it dirty
        require(clean, f"{again.num_blocks} clean blocks were copied out again")

    def shares_a_block(self, seq: kvmem.Sequence) -> bool:
        """Whether a block of its table is another sequence's too."""
        table = self.m._runtime.ledger.table_of(seq._record)
        return bool((self.state.blocks["ref_count"][table] > 1).any())

    def op_make_room(self) -> None:
        seqs = [k.seq for k in self.pick(4)]
        if not seqs:
            return
        rank = {k.seq.id: (-k.seq.priority, k.seq.id) for k in self.known.values()}
        fresh = {
            k.seq.id
            for k in self.known.values()
            if self.state.sequences["fresh"][k.seq._record] and k.seq.state == "RESIDENT"
        }
        busy = {s.id for o in self.opened for s in o.step.seqs}
        best = min(rank[s.id] for s in seqs)
        writes_over = {s.id for s in seqs if self.shares_a_block(s)}
        victims = [v.id for v in self.m.make_room(seqs, how=self.rng.choice(("auto", "recompute")))]
        require(not busy & set(victims), "a victim is in an open step")
        kept = set()  # from their step by pins: the best of the list, who go first
        for seq in sorted(seqs, key=lambda s: rank[s.id]) if self.pins else ():
            fits = seq.state == "RESIDENT" or self.m.can_fit(seqs=[seq]) == "yes"
            # one that was to copy on write needs a block less once it has given up the shared one
            if fits and not (seq.id in victims and seq.id in writes_over):
                break
            kept.add(seq.id)
        victims = [v for v in victims if v not in kept]
        require(all(rank[v] > best for v in victims), "a victim ranks before the best of the list")
        order = [(v not in fresh, rank[v]) for v in victims]
        require(
            order == sorted(order, reverse=True),
            "victims are not taken from the worst up, those just swapped in last",
        )

    def op_pin(self) -> None:
        if len(self.pins) >= 2:
            return
        for k in self.pick(1):
            with contextlib.suppress(kvmem.PinError):
                self.pins.append(self.m.pin(k.seq))

    def op_unpin(self) -> None:
        if self.pins:
            self.pins.pop(self.rng.randrange(len(self.pins))).release()

    def op_evict(self) -> None:
        tier = self.rng.choice(("device", "device", "host"))
        self.m.evict(self.rng.randint(1, 4), tier)

    def op_match(self) -> None:
        """A match is exactly the longest cached path; the forecast of create agrees."""
        self.m.poll()
        while self.m._runtime.failed:  # recovered from here, not inside `match`
            self.m.poll()
        tokens = self.rng.choice(self.prefixes)[: self.rng.randint(1, 12)]
        name = self.rng.choice(NAMESPACES)
        number = self.m._runtime.ledger._namespaces.get(
            b"" if name is None else b"s" + name.encode(), 0
        )
        paths, bs = self.node_paths(), self.setup.block_size
        length = 0
        while length + bs <= len(tokens) and (number, *tokens[: length + bs]) in paths:
            length += bs
        found = self.m.match(tokens, name)
        require(found.num_tokens == length, f"match found {found.num_tokens} of {length} (R4)")
        require(found.on_device + found.on_host == length, "match splits its tokens wrongly")

    def op_reset(self) -> None:
        try:
            self.m.reset(self.rng.choice((None, "tenant")))
        except kvmem.KVMemError:  # the device failed
            raise
        except RuntimeError:
            require(bool(self.opened), "reset refused without an open step")

    # --- streams ----------------------------------------------------------------------------------

    def op_hold(self) -> None:
        self.let_go()
        self.wait_for_copies()
        for stream in self.rng.choice(((), (Stream.OUT,), (Stream.IN,), COPY_STREAMS)):
            self.store.device.hold(stream)
            self.held.add(stream)

    def op_settle(self) -> None:
        """Let all copies end; without open steps compare every block in both tiers."""
        self.let_go()
        self.wait_for_copies()
        if not self.opened:
            self.check_content()
        stats = self.m.stats()
        size = self.store.layout.frame_bytes
        out, into = (
            stats.blocks_out - stats.blocks_out_failed,
            stats.blocks_in - stats.blocks_in_failed,
        )
        require(out * size == stats.bytes_out_done, "bytes out differ from the device's (R10)")
        require(into * size == stats.bytes_in_done, "bytes in differ from the device's (R10)")

    # --- the end ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Compute all that is pending within a bound (R9), then give all back (DRAIN)."""
        while self.opened:
            self.op_end_step()
            self.check()
        while self.pins:
            self.op_unpin()
            self.check()
        self.complete()
        self.op_settle()
        self.drain()

    def complete(self) -> None:
        """make_room and fit="some" end within a bound, freeing what is done."""
        for _ in range(120):
            todo = list(self.known.values())
            if not todo:
                return
            for k in todo:
                if k.seq.num_computed == len(k.tokens) or len(k.tokens) > self.capacity():
                    self.m.free([k.seq])
                    del self.known[k.seq.id]
            seqs = self.in_order([k.seq for k in self.known.values()])
            victims = {v.id for v in self.m.make_room(seqs, how="auto", max_tokens=8)}
            step = self.plan([s for s in seqs if s.id not in victims], "some", 8, None, 0)
            assert step is not None
            self.run_step(step, abort=False, at_once=True)
            self.check()
        raise Broken("work does not end within its bound (R9)")

    def in_order(self, seqs: list[kvmem.Sequence]) -> list[kvmem.Sequence]:
        """The rows of a step, as they come."""
        return seqs

    def capacity(self) -> int:
        """Tokens that surely fit: a copy on write needs one block more until the step ends."""
        return (self.setup.device_blocks - 1) * self.setup.block_size

    def drain(self) -> None:
        """Evict everything: each tier is empty again and nothing is cached (R9)."""
        for tier in ("device", "host"):
            self.m.evict(1000, tier)
            self.check()
        stats = self.m.stats()
        require(stats.device.free == stats.device.total, "device frames are lost (DRAIN)")
        require(stats.host.free == stats.host.total, "host frames are lost (DRAIN)")
        require(stats.cached_nodes == 0, "nodes are left (DRAIN)")
        require(int(self.state.ledger["num_blocks_used"][0]) == 0, "block ids are lost (DRAIN)")


def drive(seed: int, setup: Setup) -> None:
    """Run one seed; raises what it finds, with the operations that led there."""
    driver = Driver(seed, setup)
    try:
        driver.run()
    except BaseException as error:
        error.add_note(f"seed {seed}, {len(driver.log)} operations, last: {driver.log[-6:]}")
        raise
    finally:
        driver.close()


__all__ = ["Broken", "Driver", "Setup", "drive"]
