"""Which blocks have which frames: taking, evicting, dropping, and who is evictable (R1, R2).

`settle` is the one place that moves blocks in and out of the LRU lists and lets go of blocks
without owner: every function that changes a count calls it afterwards. Nothing here waits for a
copy: a frame is handed on at once, and the fences in its record tell the plan what the taker's
stream has to wait for (R3, R6).

    device frame evictable:  no RESIDENT table and no pin names its block
    host frame evictable:    its block has no SWAPPED owner, and no copy of this plan reads it
    block dropped:           no owner, no pin, not published
"""

from __future__ import annotations

import numpy as np

from . import lru
from .copies import (
    cancel_copy_out,
    device_frame_beside,
    host_frame_beside,
    match_frames,
    plan_copy_in,
    plan_copy_out,
)
from .frames import device_at, host_at
from .free_list import give_free, take_free, take_free_beside
from .issue import issue_copies
from .jit import compiled
from .state import (
    BUSY,
    DEVICE,
    DROP,
    EXCLUSIVE,
    HOST,
    IN_DEVICE_LRU,
    IN_HOST_LRU,
    MAX_NAMESPACE,
    MAX_ROUNDS,
    QUEUED,
    SWEPT,
    UNSAVED,
    WRITE_THROUGH,
    State,
)
from .trie import has_children, remove_node


@compiled
def leave_list(state: State, b: int, bit: int) -> None:
    """Take a block's frame out of the device or host LRU if it is there. O(1)."""
    block = state.blocks[b]
    if block.bits & bit:
        block.bits &= ~bit
        if bit == IN_DEVICE_LRU:
            if block.bits & SWEPT:
                lru.leave_swept(state, block.device_frame)
                block.bits &= ~SWEPT
            lru.remove(state, DEVICE, block.device_frame)
        else:
            lru.remove(state, HOST, block.host_frame)


@compiled
def settle_lists(state: State, b: int) -> None:
    """Bring a block's places in the LRU lists in line with its counts; as newest. O(1)."""
    block = state.blocks[b]
    if block.device_frame != 0 and block.num_resident == 0 and block.num_pins == 0:
        if not block.bits & IN_DEVICE_LRU:
            block.bits |= IN_DEVICE_LRU
            lru.append_newest(state, DEVICE, block.device_frame)
    else:
        leave_list(state, b, IN_DEVICE_LRU)
    unowned = block.ref_count == block.num_resident  # no SWAPPED table relies on the host copy
    if block.host_frame != 0 and unowned and not block.bits & BUSY:
        if block.device_frame != 0 and state.ledger[0].tier_policy == EXCLUSIVE:
            give_free(state, HOST, vacate_host(state, b))  # it lives in one tier
        elif not block.bits & IN_HOST_LRU:
            block.bits |= IN_HOST_LRU
            lru.append_newest(state, HOST, block.host_frame)
    else:
        leave_list(state, b, IN_HOST_LRU)


@compiled
def list_fill(state: State, f: int) -> None:
    """List a device frame that holds nothing to be filled, with poison or zeros (R12). O(1)."""
    ledger, frame = state.ledger[0], state.frames[device_at(state, f)]
    # written in the order of the out stream; the next user waits for it
    state.fill_list[ledger.num_fills] = f
    ledger.num_fills += 1
    ledger.out_opened = 1
    frame.fence_out = ledger.last_out + 1
    ledger.out_after_step = max(ledger.out_after_step, frame.last_use)
    ledger.out_after_in = max(ledger.out_after_in, frame.fence_in)


@compiled
def vacate_device(state: State, b: int) -> int:
    """Part a block from its device frame and return the frame, which now holds nothing. O(1)."""
    leave_list(state, b, IN_DEVICE_LRU)
    f = int(state.blocks[b].device_frame)
    state.blocks[b].device_frame = 0
    frame = state.frames[device_at(state, f)]
    frame.block = 0
    frame.generation += 1
    if state.ledger[0].record_fills:
        list_fill(state, f)
    return f


@compiled
def vacate_host(state: State, b: int) -> int:
    """Part a block from its host frame and return the frame, which now holds nothing. O(1)."""
    leave_list(state, b, IN_HOST_LRU)
    h = int(state.blocks[b].host_frame)
    state.blocks[b].host_frame = 0
    state.blocks[b].bits &= ~UNSAVED
    frame = state.frames[host_at(state, h)]
    frame.block = 0
    frame.num_tokens = 0
    frame.generation += 1
    return h


@compiled
def forget_block(state: State, b: int) -> None:
    """Give back the id of a block that has no frame left, and its node (R4). O(probes)."""
    ledger, block = state.ledger[0], state.blocks[b]
    if block.node:
        remove_node(state, int(block.node))
    block.num_tokens = 0
    block.bits &= QUEUED  # the ring still has its id
    block.node = ledger.block_free
    ledger.block_free = b
    ledger.num_blocks_used -= 1


@compiled
def settle(state: State, b: int) -> None:
    """After a count changed: into or out of the LRU lists, or, without owner, gone (R1). O(1)."""
    block = state.blocks[b]
    if block.ref_count == 0 and block.num_pins == 0 and block.node == 0:
        if block.device_frame:
            give_free(state, DEVICE, vacate_device(state, b))
        if block.host_frame:
            give_free(state, HOST, vacate_host(state, b))
        forget_block(state, b)
    else:
        settle_lists(state, b)


@compiled
def take_block(state: State) -> int:
    """A fresh block id for a frame in hand: there are as many ids as frames. O(1)."""
    ledger = state.ledger[0]
    b = int(ledger.block_free)
    ledger.block_free = state.blocks[b].node
    ledger.num_blocks_used += 1
    state.blocks[b].node = 0
    return b


@compiled
def is_clean(state: State, b: int) -> bool:
    """True when the host copy holds all of the block's tokens (or will, once copied). O(1)."""
    h = state.blocks[b].host_frame
    return bool(h != 0 and state.frames[host_at(state, h)].num_tokens == state.blocks[b].num_tokens)


@compiled
def evict_host(state: State) -> int:
    """Part the oldest cached copy from its host frame and return the frame, 0 when every host
    frame is owned. O(1)."""
    ledger = state.ledger[0]
    h = int(state.pools[HOST].oldest)
    if h == 0:
        return 0
    b = int(state.frames[host_at(state, h)].block)
    cancel_copy_out(state, h)
    vacate_host(state, b)
    ledger.evicted_host += 1
    if state.blocks[b].device_frame == 0:  # its last tier; lru.py says why it has no cached child
        ledger.dropped += 1
        forget_block(state, b)
    return h


@compiled
def release_busy(state: State) -> None:
    """Let go of the host frames that the round's copies in read. O(copies in)."""
    for i in range(state.ledger[0].in_begin, state.ledger[0].num_in):
        b = int(state.frames[host_at(state, state.in_list[i, 0])].block)
        state.blocks[b].bits &= ~BUSY
        settle_lists(state, b)


@compiled
def begin_round(state: State) -> None:
    """Issue the plan's copies so far, so that the host frames of what was copied in can be taken by
    what goes out next (issue.py). O(copies of the round)."""
    ledger = state.ledger[0]
    if ledger.num_rounds == MAX_ROUNDS:
        return
    release_busy(state)
    issue_copies(state, state.rounds[ledger.num_rounds])
    ledger.num_rounds += 1


@compiled
def take_host_frame(state: State, f: int) -> int:
    """A host frame for what device frame `f` holds: free, at best the one that continues the run of
    copies, else the oldest cached copy goes; 0 when all are owned. Under exclusive what the plan
    copied in so far gives up its host frames first. O(1), a new round O(its copies)."""
    ledger = state.ledger[0]
    h = take_free_beside(state, HOST, host_frame_beside(state, f))
    if h == 0 and ledger.may_evict > 0:
        ledger.may_evict -= 1
    elif h == 0 and ledger.tier_policy == EXCLUSIVE and ledger.num_in > ledger.in_begin:
        begin_round(state)
        h = take_free(state, HOST)
    if h:
        return h
    return evict_host(state)


@compiled
def give_host_frame(state: State, b: int, h: int) -> None:
    """Let a taken host frame hold block `b`. O(1)."""
    state.blocks[b].host_frame = h
    state.frames[host_at(state, h)].block = b
    state.frames[host_at(state, h)].num_tokens = 0


@compiled
def save_to_host(state: State, b: int) -> None:
    """Copy an evicted dirty block to the host tier if a frame can be had there. O(1)."""
    leave_list(state, b, IN_HOST_LRU)  # an incomplete copy must not be its own victim
    if state.blocks[b].host_frame == 0:
        h = take_host_frame(state, int(state.blocks[b].device_frame))
        if h:
            give_host_frame(state, b, h)
    if state.blocks[b].host_frame:
        plan_copy_out(state, b)


@compiled
def evict_device(state: State) -> int:
    """Part the oldest evictable block from its device frame and return the frame. O(1).

    A clean block only loses the frame. A dirty one is cached content (a SWAPPED owner's is clean
    since `swap_out`): it is copied to the host tier, when a frame can be had there, under
    every policy but "none", and under that when the host tier still caches its children (R4) or
    its first copy out failed (UNSAVED); else it is dropped. Its device frame is departing and
    handed on at once (design section 2).

    What write-through cleaning has swept (cleaning.py) keeps its place in the host LRU. Where it is
    dirty, newer copies have taken that place; saved as the newest it would be newer than its parent
    (R4), so it is dropped.
    """
    ledger = state.ledger[0]
    f = int(state.pools[DEVICE].oldest)
    b = int(state.frames[device_at(state, f)].block)
    in_place = ledger.tier_policy == WRITE_THROUGH and state.blocks[b].bits & SWEPT != 0
    ledger.evicted_device += 1
    if is_clean(state, b):
        ledger.evicted_clean += 1
        if state.blocks[b].bits & IN_HOST_LRU and not in_place:  # as fresh as its device copy was
            lru.remove(state, HOST, state.blocks[b].host_frame)
            lru.append_newest(state, HOST, state.blocks[b].host_frame)
    elif (
        (ledger.tier_policy != DROP and not in_place)
        or has_children(state, b)
        or state.blocks[b].bits & UNSAVED
    ):
        save_to_host(state, b)
    clean = is_clean(state, b)
    vacate_device(state, b)
    if clean:
        settle_lists(state, b)
        return f
    if state.blocks[b].host_frame:  # an incomplete copy is worth nothing alone
        give_free(state, HOST, vacate_host(state, b))
    ledger.dropped += 1
    forget_block(state, b)
    return f


@compiled
def take_device_frame(state: State, beside: int) -> int:
    """A device frame that holds nothing: free, at best `beside` (0: any), or evicted; the caller
    knows there is one. O(1)."""
    f = take_free_beside(state, DEVICE, beside)
    if f:
        return f
    return evict_device(state)


@compiled
def give_device_frame(state: State, b: int, f: int, namespace: int) -> None:
    """Let a taken device frame hold block `b`, of a namespace. O(1)."""
    frame = state.frames[device_at(state, f)]
    state.blocks[b].device_frame = f
    frame.block = b
    frame.namespace = namespace if namespace <= MAX_NAMESPACE else -1


@compiled
def enter_residency(state: State, b: int) -> None:
    """Count one more RESIDENT table; a block without device frame guards its host copy. O(1)."""
    block = state.blocks[b]
    block.num_resident += 1
    if block.device_frame == 0 and not block.bits & BUSY:
        block.bits |= BUSY
        state.ledger[0].num_busy += 1
    settle_lists(state, b)


@compiled
def leave_residency(state: State, b: int, epoch: int) -> None:
    """Count one RESIDENT table less; `epoch` is the last step that may have used it. O(1)."""
    block = state.blocks[b]
    block.num_resident -= 1
    frame = state.frames[device_at(state, block.device_frame)]
    frame.last_use = max(frame.last_use, epoch)


@compiled
def arrive(state: State, start: int, num_blocks: int, namespace: int) -> int:
    """Give each block of a RESIDENT table a device frame and fill its frame table; return the in
    transfer that completes them, 0 none. Room was counted before. O(blocks)."""
    ledger, begin, fence = state.ledger[0], int(state.ledger[0].num_in), np.int64(0)
    for i in range(start, start + num_blocks):
        b = int(state.table[i])
        if state.blocks[b].device_frame == 0:
            beside = device_frame_beside(state, int(state.blocks[b].host_frame))
            give_device_frame(state, b, take_device_frame(state, beside), namespace)
            plan_copy_in(state, b)
    match_frames(state, max(begin, int(ledger.in_begin)))
    for i in range(start, start + num_blocks):
        f = state.blocks[state.table[i]].device_frame
        state.frame_table[i] = f
        fence = max(fence, state.frames[device_at(state, f)].fence_in)
    return fence
