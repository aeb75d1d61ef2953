"""The copies between the tiers that the plan being made lists, and the frames that keep them long.

Copies whose frames follow each other in both arenas are one run of bytes for the device. So a copy
is given the frame next to that of the copy before it where that one is free (free_list.py).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .frames import device_at, host_at
from .jit import compiled
from .state import UNSAVED, State


@compiled
def plan_copy_out(state: State, b: int) -> None:
    """List the copy of a block's device frame to its host frame, with its orderings (R6). O(1)."""
    ledger, block = state.ledger[0], state.blocks[b]
    source = state.frames[device_at(state, block.device_frame)]
    target = state.frames[host_at(state, block.host_frame)]
    i = ledger.num_out
    state.out_list[i, 0] = block.device_frame
    state.out_list[i, 1] = block.host_frame
    state.out_list[i, 2] = block.num_tokens
    state.out_list[i, 3] = target.generation
    block.bits &= ~UNSAVED
    ledger.num_out += 1
    ledger.blocks_out += 1
    ledger.out_opened = 1
    ledger.out_after_step = max(ledger.out_after_step, source.last_use)
    ledger.out_after_in = max(ledger.out_after_in, source.fence_in, target.fence_in)
    source.fence_out = ledger.last_out + 1
    target.fence_out = ledger.last_out + 1
    target.num_tokens = block.num_tokens


@compiled
def cancel_copy_out(state: State, h: int) -> None:
    """Unlist a copy of this plan whose host frame is taken again before it began. O(copies)."""
    ledger = state.ledger[0]
    if state.frames[host_at(state, h)].fence_out <= ledger.last_out:
        return
    for i in range(ledger.num_out - 1, -1, -1):
        if state.out_list[i, 1] == h:
            for j in range(i, ledger.num_out - 1):  # keeps the order of the others
                for k in range(4):
                    state.out_list[j, k] = state.out_list[j + 1, k]
            ledger.num_out -= 1
            ledger.blocks_out -= 1
            return


@compiled
def plan_copy_in(state: State, b: int) -> None:
    """List the copy of a block's host frame to its fresh device frame (R6). O(1)."""
    ledger, block = state.ledger[0], state.blocks[b]
    source = state.frames[host_at(state, block.host_frame)]
    target = state.frames[device_at(state, block.device_frame)]
    i = ledger.num_in
    state.in_list[i, 0] = block.host_frame
    state.in_list[i, 1] = block.device_frame
    state.in_list[i, 2] = block.num_tokens
    state.in_list[i, 3] = source.generation
    ledger.num_in += 1
    ledger.blocks_in += 1
    ledger.in_after_step = max(ledger.in_after_step, target.last_use)
    ledger.in_after_out = max(ledger.in_after_out, source.fence_out, target.fence_out)
    source.fence_in = ledger.last_in + 1
    target.fence_in = ledger.last_in + 1


@compiled
def frame_beside(rows: NDArray[np.int32], begin: int, end: int, f: int) -> int:
    """The target frame that would continue the run of the copies listed with source frame `f`: next
    to that of the last one, on the side on which `f` lies. 0: `f` continues none. O(1)."""
    if end <= begin:
        return 0
    step = f - int(rows[end - 1, 0])
    return int(rows[end - 1, 1]) + step if abs(step) == 1 else 0


@compiled
def host_frame_beside(state: State, f: int) -> int:
    """The host frame that would continue the run of copies out with device frame `f`. O(1)."""
    return frame_beside(state.out_list, 0, int(state.ledger[0].num_out), f)


@compiled
def device_frame_beside(state: State, h: int) -> int:
    """The device frame that would continue the run of copies in with host frame `h`. O(1)."""
    ledger = state.ledger[0]
    return frame_beside(state.in_list, int(ledger.in_begin), int(ledger.num_in), h)


@compiled
def swap_rows(rows: NDArray[np.int32], i: int, j: int, first: int, last: int) -> None:
    """Exchange the columns `first` to `last` of two rows. O(1)."""
    for k in range(first, last + 1):
        held = rows[i, k]
        rows[i, k] = rows[j, k]
        rows[j, k] = held


@compiled
def sort_rows(rows: NDArray[np.int32], begin: int, end: int, key: int, whole: bool) -> None:
    """Sort rows `begin` to `end` - 1 by a column: whole rows, or that column alone. In place, since
    nothing here may allocate. O(rows) when they are sorted, else O(rows log rows): heap sort."""
    is_sorted = True
    for i in range(begin + 1, end):
        is_sorted = is_sorted and rows[i - 1, key] <= rows[i, key]
    if is_sorted:
        return
    left, right = (0, rows.shape[1] - 1) if whole else (key, key)
    count = end - begin
    for turn in range(count // 2 + count - 1):
        if turn < count // 2:  # build the heap, from its last parent up
            parent, size = count // 2 - 1 - turn, count
        else:  # the largest goes behind the heap
            size = count - 1 - (turn - count // 2)
            swap_rows(rows, begin, begin + size, left, right)
            parent = 0
        while 2 * parent + 1 < size:
            child = 2 * parent + 1
            if child + 1 < size and rows[begin + child, key] < rows[begin + child + 1, key]:
                child += 1
            if rows[begin + parent, key] >= rows[begin + child, key]:
                break
            swap_rows(rows, begin + parent, begin + child, left, right)
            parent = child


@compiled
def match_frames(state: State, begin: int) -> None:
    """Exchange the device frames that blocks were given to be copied in (rows of in_list from
    `begin` on, of one namespace), so that they ascend with the host frames. O(rows log rows)."""
    ledger = state.ledger[0]
    end = int(ledger.num_in)
    sort_rows(state.in_list, begin, end, 0, True)
    sort_rows(state.in_list, begin, end, 1, False)
    for i in range(begin, end):
        b = int(state.frames[host_at(state, state.in_list[i, 0])].block)
        f = int(state.in_list[i, 1])
        state.blocks[b].device_frame = f
        state.frames[device_at(state, f)].block = b
