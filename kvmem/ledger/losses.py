"""Letting go of what a failed copy took: which sequences lose K/V, and from which token on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import ops_lost
from .address import Addresses
from .flights import Failure
from .state import WRITE_THROUGH, State


class Loss(NamedTuple):
    """What a failed copy took of one sequence."""

    record: int
    first_token: int  # K/V is lost from here on
    is_void: bool  # it was stepped over the lost K/V since: what it sampled last is void


def let_go(state: State, addresses: Addresses, failure: Failure) -> tuple[list[Loss], set[int]]:
    """Cut the sequences that a failure concerns; who they are, and the open steps that have some of
    them (these lose theirs when the step ends). O(table entries + nodes) where K/V is lost."""
    sequences, losses, spoiled = state.sequences, [], set()
    unsaved, lost = failure.unsaved, failure.lost
    if len(unsaved) and state.ledger["tier_policy"][0] == WRITE_THROUGH:
        # swept already: saved later, a cached block would be newer than its parent (R4)
        idle = state.blocks["ref_count"][unsaved] == 0
        lost = np.union1d(lost, unsaved[idle]).astype(np.int32)
        unsaved = np.ascontiguousarray(unsaved[~idle])
    if len(unsaved):
        ops_lost.forget_copies(addresses, unsaved)
    if len(lost):
        is_lost = np.zeros(len(state.blocks), np.int8)
        is_lost[lost] = 1
        found = np.zeros((len(sequences), 3), np.int64)
        fate = np.zeros(len(state.nodes), np.int8)
        count = ops_lost.lose(addresses, is_lost, fate, found)
        for s, token, step in found[:count].tolist():
            is_void = not step and int(sequences["last_step"][s]) > failure.epoch
            losses.append(Loss(s, token, is_void))
            if step:
                spoiled.add(step)
    # one that has given up blocks since is linked to them by its copies in alone
    left = (sequences["state"] > 0) & (sequences["left_in"] >= failure.first_in)
    stepped = left & (sequences["last_step"] > failure.epoch)
    told = {loss.record for loss in losses}
    for s in np.flatnonzero(stepped).tolist():
        if s not in told:  # the sample of an open step is still to come, over what it has now
            is_void = not sequences["step"][s]
            losses.append(Loss(s, int(sequences["num_stored"][s]), is_void))
    return losses, spoiled


def rehearse(state: State, addresses: Addresses) -> None:
    """Run the compiled functions of a loss on nothing."""
    ops_lost.forget_copies(addresses, np.zeros(0, np.int32))
    nobody, fate = np.zeros(len(state.blocks), np.int8), np.zeros(len(state.nodes), np.int8)
    ops_lost.lose(addresses, nobody, fate, np.zeros((len(state.sequences), 3), np.int64))
