"""Refusals of the ledger in words: what was asked, what is there, who holds it, what would help.

All of it is computed when something is raised, from the records: O(sequences + blocks of the few
that are named). A message names sequences by their id and holds neither tokens nor a namespace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvmem.errors import Holder, OutOfBlocks, PinError, SequenceTooLong
from kvmem.ledger import Refusal
from kvmem.ledger import decide as codes
from kvmem.ledger.state import DEVICE, GROUP, HOST, RESIDENT, SWAPPED
from kvmem.sizes import with_unit

if TYPE_CHECKING:
    from kvmem.runtime import Runtime
    from kvmem.sequence import Sequence

MOST_HOLDERS = 8


class _Tier(NamedTuple):
    """What a refusal says about a tier."""

    name: str
    setting: str
    state: int  # of the sequences that hold it
    state_name: str
    frame: str  # field of a block
    advice: str


_TIERS = {
    DEVICE: _Tier(
        "device",
        "device_blocks",
        RESIDENT,
        "RESIDENT",
        "device_frame",
        "make_room or free others, fit='some', or raise device_blocks",
    ),
    HOST: _Tier(
        "host",
        "host_blocks",
        SWAPPED,
        "SWAPPED",
        "host_frame",
        "use how='recompute' or 'auto', free others, or raise host_blocks",
    ),
}


def explain(runtime: Runtime, refusal: Refusal, seqs: list[Sequence], act: str) -> Exception:
    """A refusal of the ledger as the exception a user can act on."""
    row = f"{act}: row {refusal.row}"
    code = refusal.code
    if code == codes.NO_DEVICE_ROOM:
        return out_of_blocks(runtime, DEVICE, refusal, row if act == "step" else act)
    if code == codes.NO_HOST_ROOM:
        return out_of_blocks(runtime, HOST, refusal, act)
    if code == codes.TOO_LONG:
        return _too_long(runtime, refusal, seqs[refusal.row], row)
    if code == codes.IN_STEP:
        return RuntimeError(f"{row} is in an open step; end the step first")
    if code == codes.DRAFTS_PENDING:
        return ValueError(f"{row}: it has unaccepted drafts; call accept() first")
    if code == codes.TOO_MANY_PINS:
        return PinError("pin: a block has 32767 pins; release some")
    if code == codes.TOO_MANY_ACCEPTED:
        return ValueError(
            f"num_accepted[{refusal.row}] is more than the {refusal.available} drafts; "
            f"allowed: 0 to {refusal.available}"
        )
    raise AssertionError(f"unknown code {code}")


def out_of_blocks(runtime: Runtime, tier: int, refusal: Refusal, act: str) -> OutOfBlocks:
    """The error for a shortage, with what is there, who holds it and what would help."""
    runtime.events.refusals[tier] += 1
    state, words = runtime.ledger.state, _TIERS[tier]
    pool = state.pools[tier]
    total, free, evictable = (int(pool[n]) for n in ("num_frames", "num_free", "num_evictable"))
    pinned = int(np.count_nonzero(state.blocks["num_pins"])) if tier == DEVICE else 0
    pins = len(runtime.pins) if tier == DEVICE else 0
    holders, more_holders, more_blocks = _holders(runtime, tier)
    short_bytes = refusal.short * runtime.store.layout.frame_bytes
    value = total + refusal.short
    most = ""
    if holders:
        most = f", {holders[0].num_blocks} by {holders[0].sequence_id} ({holders[0].reason})"
    return OutOfBlocks(
        f"{act} needs {refusal.needed} blocks of the {words.name} tier, {refusal.available} are "
        f"left; of {total} there: {free} free, {evictable} evictable, {pinned} pinned; held by "
        f"{len(holders) + more_holders} {words.state_name}{most}; {refusal.short} blocks "
        f"({with_unit(short_bytes)}) short: {words.advice} to {value}",
        tier=words.name,
        needed=refusal.needed,
        free=free,
        evictable=evictable,
        pinned=pinned,
        pins=pins,
        holders=holders,
        more_holders=more_holders,
        more_blocks=more_blocks,
        short_blocks=refusal.short,
        short_bytes=short_bytes,
        setting=words.setting,
        value=value,
    )


def _too_long(runtime: Runtime, refusal: Refusal, seq: Sequence, row: str) -> SequenceTooLong:
    total = int(runtime.ledger.state.pools["num_frames"][DEVICE])
    value = total + refusal.short
    return SequenceTooLong(
        f"{row}, sequence {seq.id}: {seq.num_tokens} tokens need "
        f"{runtime.ledger.blocks_for(seq.num_tokens)} blocks (and those reserved), the device tier "
        f"has {total}; truncate it or raise device_blocks to {value}",
        setting="device_blocks",
        value=value,
    )


def _holders(runtime: Runtime, tier: int) -> tuple[tuple[Holder, ...], int, int]:
    """Who holds a tier, the largest first, and how many others there are with how many blocks."""
    state = runtime.ledger.state
    records = np.flatnonzero(state.sequences["state"] == _TIERS[tier].state)
    # each block of such a sequence has a frame there, so the length of its table is what it holds
    counts = state.tables["num_blocks"][records, GROUP]
    records, counts = records[counts > 0], counts[counts > 0]
    order = np.lexsort((state.sequences["arrival"][records], -counts))
    named, rest = order[:MOST_HOLDERS], order[MOST_HOLDERS:]
    holders = tuple(_holder(runtime, tier, s) for s in records[named].tolist())
    return holders, len(rest), int(counts[rest].sum())


def _holder(runtime: Runtime, tier: int, s: int) -> Holder:
    """One sequence that holds blocks of a tier. O(its blocks)."""
    ledger, words = runtime.ledger, _TIERS[tier]
    state = ledger.state
    sequence, ids = state.sequences[s], ledger.table_of(s)
    pinned = int(np.count_nonzero(state.blocks["num_pins"][ids]))
    frames = int(state.pools["first"][tier]) + state.blocks[words.frame][ids]
    # what was found done by the last poll; a copy that ended since then still counts
    moving = state.frames["fence_out"][frames] > int(state.ledger["retired_out"][0])
    if tier == DEVICE:
        moving = state.frames["fence_in"][frames] > int(state.ledger["retired_in"][0])
    if sequence["step"]:
        reason = "in an open step"
    elif tier == DEVICE and pinned == len(ids):
        reason = "pinned"
    elif moving.any():
        reason = "being copied"
    else:
        reason = words.state_name.lower()
    return Holder(
        sequence_id=int(sequence["arrival"]),
        state=words.state_name,
        priority=int(sequence["priority"]),
        num_blocks=len(ids),
        num_shared=int(np.count_nonzero(state.blocks["ref_count"][ids] > 1)),
        num_pinned=pinned,
        reason=reason,
    )
