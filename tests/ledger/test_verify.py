"""`verify()` itself: each rule, broken by hand in a sound ledger, is named (R1-R5)."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from kvmem.ledger.state import DEVICE, GROUP, HOST, IN_DEVICE_LRU, IN_HOST_LRU, MARKED
from kvmem.ledger.verify import LedgerCorrupt
from tests.ledger import leaves
from tests.ledger.play import Play


class Sound(Play):
    """A ledger with something of everything; blocks by the name of their owner."""

    def __init__(self) -> None:
        super().__init__(14, 8, 4)
        self.resident = self.made(13)  # three published blocks and a begun one
        self.sibling = self.made([0, 1, 2, 3, 9, 9, 9, 9])  # a sibling under the first block
        self.hidden = self.made(8, b"h", publish=False)
        self.swapped = self.made(6, b"x")
        self.swap_out(self.swapped)
        old = self.made(8, b"y")
        self.cached = self.table(old)
        self.swap_out(old)
        self.free(old)  # both its blocks are cached in both tiers
        self.waiting = self.create(5, b"z")

    def frame(self, block: int, tier: int = DEVICE) -> int:
        """The index in `frames` of a block's frame."""
        field = ("device_frame", "host_frame")[tier]
        return self.pool("first", tier) + self.b(block, field)

    def entry(self, s: int, i: int) -> int:
        """The index in `table` of a sequence's entry."""
        return int(self.state.tables["start"][s, GROUP]) + i

    def node(self, block: int) -> int:
        return self.b(block, "node")


BREACHES: list[tuple[str, Callable[[Sound], None]]] = []


def breach(message: str) -> Callable[[Callable[[Sound], None]], Callable[[Sound], None]]:
    """Register a way to break a rule, and what `verify` has to say."""

    def add(act: Callable[[Sound], None]) -> Callable[[Sound], None]:
        BREACHES.append((message, act))
        return act

    return add


# --- tables and counts ---------------------------------------------------------------------------


@breach("R2: sequence .* has an empty table entry")
def _(p: Sound) -> None:
    p.state.table[p.entry(p.resident, 1)] = 0


@breach("R2: sequence .* names a block twice")
def _(p: Sound) -> None:
    p.state.table[p.entry(p.resident, 1)] = p.table(p.resident)[0]


@breach("R2: table of .* overflows its span")
def _(p: Sound) -> None:
    p.state.tables["capacity"][p.resident, GROUP] = 2


@breach("R1: a block of RESIDENT .* has no frame")
def _(p: Sound) -> None:
    p.state.blocks["device_frame"][p.table(p.resident)[2]] = 0


@breach("R2: the frame table of .* is out of date")
def _(p: Sound) -> None:
    p.state.frame_table[p.entry(p.resident, 0)] += 1


@breach("R2: ref_count of block .* is 3, counted 2")
def _(p: Sound) -> None:
    p.state.blocks["ref_count"][p.table(p.resident)[0]] += 1


@breach("R2: num_resident of block .* is 1, counted 2")
def _(p: Sound) -> None:
    p.state.blocks["num_resident"][p.table(p.resident)[0]] -= 1


# --- pools ---------------------------------------------------------------------------------------


@breach("R1: device free list loops")
def _(p: Sound) -> None:
    f = p.pool("free_head")
    p.state.frames["next"][f] = f


@breach("R1: the device free list reads otherwise backwards")
def _(p: Sound) -> None:
    p.state.pools["free_tail"][DEVICE] = p.pool("free_head")


@breach("R1: host num_free is")
def _(p: Sound) -> None:
    p.state.pools["num_free"][HOST] += 1


@breach("R1: two blocks in one device frame")
def _(p: Sound) -> None:
    one, other = p.cached
    p.state.blocks["device_frame"][one] = p.b(other, "device_frame")


@breach("R1: a free device frame holds a block")
def _(p: Sound) -> None:
    p.state.frames["block"][p.pool("free_head")] = 1


@breach("R1: device frame .* denies")
def _(p: Sound) -> None:
    p.state.frames["block"][p.frame(p.cached[0])] = p.cached[1]


@breach("R1: host: .* free .* !=")
def _(p: Sound) -> None:
    leaves.take_free(p.state, HOST)


@breach("R1: host null frame holds a block")
def _(p: Sound) -> None:
    p.state.frames["block"][p.pool("first", HOST)] = 1


@breach("R2: the device LRU reads otherwise backwards")
def _(p: Sound) -> None:
    p.state.frames["previous"][p.pool("newest")] = 0


@breach("R2: host num_evictable is off")
def _(p: Sound) -> None:
    p.state.pools["num_evictable"][HOST] -= 1


@breach("R2: the device LRU and its bits differ")
def _(p: Sound) -> None:
    p.state.blocks["bits"][p.cached[0]] &= ~IN_DEVICE_LRU


@breach("R2: device evictable")
def _(p: Sound) -> None:
    p.state.blocks["bits"][p.cached[1]] &= ~IN_DEVICE_LRU
    leaves.remove(p.state, DEVICE, p.b(p.cached[1], "device_frame"))


@breach("R2: host evictable")
def _(p: Sound) -> None:
    """The only safe copy of a SWAPPED sequence's block could be evicted."""
    b = p.table(p.swapped)[0]
    p.state.blocks["bits"][b] |= IN_HOST_LRU
    leaves.append_newest(p.state, HOST, p.b(b, "host_frame"))


@breach("R4: block .* is newer than its parent in tier 0")
def _(p: Sound) -> None:
    f = p.b(p.cached[1], "device_frame")
    leaves.remove(p.state, DEVICE, f)
    leaves.append_newest(p.state, DEVICE, f)


# --- blocks --------------------------------------------------------------------------------------


@breach("R1: block ids are lost")
def _(p: Sound) -> None:
    p.state.ledger["num_blocks_used"] += 1


@breach("R2: block .* is left marked")
def _(p: Sound) -> None:
    p.state.blocks["bits"][p.cached[0]] |= MARKED


@breach("R1: free block .* is in use")
def _(p: Sound) -> None:
    begun = p.table(p.resident)[3]  # it has no node, so it ends the list
    (last,) = [
        b
        for b in range(1, len(p.state.blocks))
        if not p.b(b, "device_frame") and not p.b(b, "host_frame") and not p.b(b, "node")
    ]
    p.state.blocks["node"][last] = begun
    p.state.ledger["num_blocks_used"] -= 1


@breach("R1: live block .* has no frame")
def _(p: Sound) -> None:
    p.state.ledger["block_free"] = p.b(p.of("block_free"), "node")
    p.state.ledger["num_blocks_used"] += 1


@breach("R1: block .* is kept without owner")
def _(p: Sound) -> None:
    leaf = p.cached[1]
    leaves.forget(p.state, p.node(leaf))
    p.state.blocks["node"][leaf] = 0


@breach("R2: block .* has too many tokens")
def _(p: Sound) -> None:
    p.state.blocks["num_tokens"][p.table(p.resident)[3]] = 5


@breach("R3: host copy of .* claims 4")
def _(p: Sound) -> None:
    b = p.table(p.swapped)[1]
    assert p.b(b, "num_tokens") == 2
    p.state.frames["num_tokens"][p.frame(b, HOST)] = 4


@breach("R5: the only safe copy of block .* is incomplete")
def _(p: Sound) -> None:
    p.state.frames["num_tokens"][p.frame(p.table(p.swapped)[1], HOST)] = 1


@breach("R5: block .* of a SWAPPED sequence has no host copy")
def _(p: Sound) -> None:
    b = p.table(p.swapped)[1]
    h = p.b(b, "host_frame")
    p.state.frames["block"][p.frame(b, HOST)] = 0
    p.state.blocks["host_frame"][b] = 0
    leaves.give_free(p.state, HOST, h)


# --- the trie ------------------------------------------------------------------------------------


@breach("R4: num_nodes is off")
def _(p: Sound) -> None:
    p.state.ledger["num_nodes"] += 1


@breach("R4: the index and the nodes differ")
def _(p: Sound) -> None:
    p.state.index[np.flatnonzero(p.state.index)[0]] = 0


@breach("R4: an index entry has another's hash")
def _(p: Sound) -> None:
    p.state.index[np.flatnonzero(p.state.index)[0]] ^= np.uint32(1 << 31)


@breach("R4: node .* and block .* disagree")
def _(p: Sound) -> None:
    one, other = p.table(p.resident)[:2]
    p.state.blocks["node"][[one, other]] = p.state.blocks["node"][[other, one]]


@breach("R4: block .* is not full")
def _(p: Sound) -> None:
    p.state.blocks["num_tokens"][p.table(p.resident)[0]] = 3


@breach("R4: parent of .* is gone")
def _(p: Sound) -> None:
    p.state.nodes["parent"][p.node(p.cached[1])] = p.of("node_free")


@breach("R4: node .* is published twice")
def _(p: Sound) -> None:
    one, other = p.node(p.table(p.resident)[1]), p.node(p.table(p.sibling)[1])
    p.state.node_keys[one] = p.state.node_keys[other]


@breach("R4: node .* can't be found")
def _(p: Sound) -> None:
    n = p.node(p.table(p.resident)[0])
    size = len(p.state.index)
    bits = p.of("id_bits")
    at = int(np.flatnonzero(p.state.index & ((1 << bits) - 1) == n)[0])
    hole = int(np.flatnonzero(p.state.index == 0)[0])
    assert hole != at
    row_hash = -(-(hole << 32) // size)  # its home is the hole
    p.state.nodes["hash"][n] = row_hash
    p.state.index[at] = (row_hash << bits & 0xFFFFFFFF) | n
    assert (int(p.state.nodes["hash"][n]) * size) >> 32 == hole


@breach("R4: children of node")
def _(p: Sound) -> None:
    p.state.nodes["num_children"][p.node(p.table(p.resident)[0])] -= 1


@breach("R4: children of namespace")
def _(p: Sound) -> None:
    p.state.namespaces["num_children"][p.q(p.resident, "namespace")] += 1


# --- sequences -----------------------------------------------------------------------------------


@breach("R2: num_sequences is off")
def _(p: Sound) -> None:
    p.state.ledger["num_sequences"] -= 1


@breach("R2: state of sequence")
def _(p: Sound) -> None:
    p.state.sequences["state"][p.waiting] = 7


@breach("R2: num_computed of")
def _(p: Sound) -> None:
    p.state.sequences["num_computed"][p.waiting] = 6


@breach("R2: num_stored of")
def _(p: Sound) -> None:
    p.state.sequences["num_computed"][p.waiting] = 1


@breach("R2: num_drafts of")
def _(p: Sound) -> None:
    p.state.sequences["num_drafts"][p.waiting] = -1


@breach("R2: WAITING .* has blocks")
def _(p: Sound) -> None:
    p.state.sequences["state"][p.swapped] = 1


@breach("R2: planned .* is not RESIDENT")
def _(p: Sound) -> None:
    p.state.sequences["step"][p.swapped] = 9


@breach("R2: sequence .*: 4 blocks for 4")
def _(p: Sound) -> None:
    p.state.sequences["num_computed"][p.resident] = 4
    p.state.sequences["num_stored"][p.resident] = 4


@breach("R4: path of .* breaks at 3")
def _(p: Sound) -> None:
    p.state.sequences["num_published"][p.resident] = 4


@breach("R4: path of .* breaks at 0")
def _(p: Sound) -> None:
    """The sequence stands on a block of another namespace."""
    p.state.sequences["namespace"][p.resident] = p.q(p.swapped, "namespace")


@breach("R4: block 1 of .*: other tokens")
def _(p: Sound) -> None:
    p.state.tokens[p.q(p.resident, "keys_start") + 5] = 77


@breach("R5: block 1 of")
def _(p: Sound) -> None:
    p.state.blocks["num_tokens"][p.table(p.hidden)[1]] = 3


@breach("R2: two tokens spans overlap")
def _(p: Sound) -> None:
    p.state.sequences["tokens_start"][p.waiting] = p.q(p.hidden, "tokens_start")


@breach("R2: a tokens span lies above")
def _(p: Sound) -> None:
    p.state.ledger["tokens_top"] -= 1


@breach("R2: a table span lies above")
def _(p: Sound) -> None:
    p.state.ledger["table_top"] = 0


# --- the tests -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("message", "act"), BREACHES, ids=[m for m, _ in BREACHES])
def test_the_breach_is_named(message: str, act: Callable[[Sound], None]) -> None:
    sound = Sound()
    sound.ledger.verify()
    act(sound)
    with pytest.raises(LedgerCorrupt) as caught:
        sound.ledger.verify()
    assert re.match(message, str(caught.value)), f"verify says {caught.value}"


def test_verify_changes_nothing() -> None:
    sound = Sound()
    before = {name: np.array(getattr(sound.state, name)) for name in sound.state._fields}
    sound.ledger.verify()
    for name, old in before.items():
        assert np.array_equal(old, getattr(sound.state, name)), name


def test_the_source_of_an_open_copy_on_write_counts_as_named() -> None:
    sound = Sound()
    sound.truncate(sound.sibling, 6)
    (child,) = sound.fork(sound.sibling)
    sound.append(child, 5)
    plan, arrays = sound.plan(child)  # verifies
    assert len(plan.copy_source) == 1
    opened = sound.ledger.open_steps.pop(arrays.epoch)  # as if the step were unknown
    with pytest.raises(LedgerCorrupt, match="R2: ref_count"):
        sound.ledger.verify()
    sound.ledger.open_steps[arrays.epoch] = opened
    sound.end(arrays, commit=False)
