"""Replay a trace of prompts on the ledger alone, without storage, and count block hits.

    python -m tools.replay TRACE --device-blocks 3000 --host-blocks 7000 --tier-policy exclusive

The rules are those of a cache study: requests in the order of the file, one at a time; a hit is a
block inside the longest cached run from the head of the prompt; then the whole prompt is touched,
its tail first; a tier evicts down to its blocks. A hash id stands for a block and for all before
it, so one token, the id itself, in blocks of one token says all that the trie has to know.

Copies take no time here: all are done before the next request, and the link is idle after each, so
`write_through` has copied everything. What a policy can serve is measured, not how fast.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvmem.ledger import Ledger
from kvmem.traces import LAYOUTS, read_trace

CLEANED_AT_ONCE = 1024  # blocks
MAX_TOKEN = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay counted, in blocks."""

    num_hits: int
    num_blocks: int  # of all prompts
    blocks_out: int  # copied device to host
    blocks_in: int
    evicted_device: int  # that lost their device frame
    evicted_clean: int  # of these, without a copy

    @property
    def hit_rate(self) -> float:
        """Hits in percent of the blocks asked for."""
        return 100 * self.num_hits / max(1, self.num_blocks)


def replay(
    prompts: Iterable[NDArray[np.int64]],
    *,
    device_blocks: int,
    host_blocks: int = 0,
    tier_policy: str = "none",
    watermarks: tuple[int, int] = (0, 0),
) -> Replayed:
    """Replay prompts, each the hash ids of its blocks; `watermarks` in device blocks.

    Raises ValueError for one that is longer than the device tier, or that holds an id of more than
    31 bits. O(blocks).
    """
    ledger = Ledger(
        device_blocks=device_blocks,
        host_blocks=host_blocks,
        block_size=1,
        tier_policy=tier_policy,
        watermarks=watermarks,
        hash_seed=1,
    )
    for number, ids in enumerate(prompts):
        if len(ids) > device_blocks:
            raise ValueError(
                f"prompt {number} has {len(ids)} blocks, the device tier {device_blocks}: what "
                f"never fits is never cached; raise device_blocks"
            )
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) <= MAX_TOKEN:
            raise ValueError(f"prompt {number} has ids outside 0..{MAX_TOKEN}; number them anew")
        seqs = np.array([ledger.create(ids.astype(np.int32), namespace=b"")], np.int32)
        _, arrays = ledger.plan_step(seqs)
        ledger.end_step(arrays.epoch, commit=True)
        ledger.free(seqs)
        _let_copies_end(ledger)
    names = (
        "hit_tokens", "query_tokens", "blocks_out", "blocks_in", "evicted_device", "evicted_clean",
    )  # fmt: skip
    return Replayed(*(int(ledger.state.ledger[0][name]) for name in names))


def _let_copies_end(ledger: Ledger) -> None:
    """All copies made so far are done, and then those that wait for a link with nothing to do."""
    counted = ledger.state.ledger[0]
    ledger.retire(int(counted["last_out"]), int(counted["last_in"]))
    while ledger.wants_cleaning:
        ledger.clean(CLEANED_AT_ONCE)
        ledger.retire(int(counted["last_out"]), int(counted["last_in"]))


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Block hits of a trace under a tier policy.")
    parser.add_argument("trace", help="JSON lines, plain or gzip")
    parser.add_argument("--layout", choices=tuple(LAYOUTS), default="mooncake")
    parser.add_argument("--device-blocks", type=int, required=True)
    parser.add_argument("--host-blocks", type=int, default=0)
    parser.add_argument("--tier-policy", default="none")
    asked = parser.parse_args(arguments)
    replayed = replay(
        (request.hash_ids for request in read_trace(asked.trace, layout=asked.layout)),
        device_blocks=asked.device_blocks,
        host_blocks=asked.host_blocks,
        tier_policy=asked.tier_policy,
    )
    print(f"{replayed.num_hits} hits of {replayed.num_blocks} blocks: {replayed.hit_rate:.2f} %")
    print(
        f"{replayed.blocks_out} blocks copied out, {replayed.blocks_in} in; "
        f"{replayed.evicted_clean} of {replayed.evicted_device} evictions without a copy"
    )


if __name__ == "__main__":
    main()
