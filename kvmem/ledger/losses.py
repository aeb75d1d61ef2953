"""Letting go of what a failed copy took: which sequences lose K/V, and from which token on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import ops_lost
from .address import Addresses
from .flights import Failure
from .state import WAITING, State


class Loss(NamedTuple):
    """What a failed copy took of one sequence."""

    record: int
    first_token: int  # K/V is lost from here on
    is_void: bool  # it was stepped over the lost K/V since: what it sampled last is void


def let_go(state: State, addresses: Addresses, failure: Failure) -> tuple[list[Loss], set[int]]:
    """Cut the sequences that a failure concerns; who they are, and the open steps that have some of
    them (these lose theirs when the step ends). O(table entries + nodes) where K/V is lost."""
    sequences, losses, spoiled = state.sequences, [], set()
    if len(failure.unsaved):
        ops_lost.forget_copies(addresses, failure.unsaved)
    if len(failure.lost):
        is_lost = np.zeros(len(state.blocks), np.int8)
        is_lost[failure.lost] = 1
        found = np.zeros((len(sequences), 3), np.int64)
        fate = np.zeros(len(state.nodes), np.int8)
        count = ops_lost.lose(addresses, is_lost, fate, found)
        for s, token, step in found[:count].tolist():
            is_void = not step and int(sequences["last_step"][s]) > failure.epoch
            losses.append(Loss(s, token, is_void))
            if step:
                spoiled.add(step)
    # one that has given up its blocks since is linked to them by its copies in alone
    left = (sequences["state"] == WAITING) & (sequences["left_in"] >= failure.first_in)
    void = left & (sequences["last_step"] > failure.epoch)
    losses += [Loss(int(s), 0, is_void=True) for s in np.flatnonzero(void)]
    return losses, spoiled


def rehearse(state: State, addresses: Addresses) -> None:
    """Run the compiled functions of a loss on nothing."""
    ops_lost.forget_copies(addresses, np.zeros(0, np.int32))
    nobody, fate = np.zeros(len(state.blocks), np.int8), np.zeros(len(state.nodes), np.int8)
    ops_lost.lose(addresses, nobody, fate, np.zeros((len(state.sequences), 3), np.int64))
