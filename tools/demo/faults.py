"""Six faults planted in the K/V of a running sequence: the check has to catch each of them.

They stand for what a cache can do wrong: a slot not written, a slot read from elsewhere, a copy
that ends early, a block that never arrived, a wrong frame in a table. Each is planted once, through
`Manager.kv`, in positions that are already computed, right before the model runs a later step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

BACK = 20  # the faulty token stands so far behind the last computed one

Slots = Callable[[int], tuple[int, int]]  # position -> (frame, offset)


def one_slot_of_one_layer(kv: Any, slot: Slots, length: int, block_size: int, layers: int) -> None:
    """A value that was never written: a token a little back, in the middle layer."""
    frame, offset = slot(length - BACK)
    kv(layers // 2)[1][frame, offset] = 0


def one_key_of_one_layer(kv: Any, slot: Slots, length: int, block_size: int, layers: int) -> None:
    """A key stored one slot off: a token a little back has that of the token before it."""
    (frame, offset), (other, before) = slot(length - BACK), slot(length - BACK - 1)
    key = kv(layers // 2)[0]
    key[frame, offset] = key[other, before]


def one_slot_of_all_layers(kv: Any, slot: Slots, length: int, block_size: int, layers: int) -> None:
    """A whole slot read from elsewhere: a token has the K and V of one 8 positions before it."""
    (frame, offset), (other, before) = slot(length - BACK), slot(length - BACK - 8)
    for layer in range(layers):
        for plane in kv(layer):
            plane[frame, offset] = plane[other, before]


def half_a_block(kv: Any, slot: Slots, length: int, block_size: int, layers: int) -> None:
    """A copy that ended early: the second half of a full block holds zeros."""
    frame, _ = slot((length // block_size - 2) * block_size)
    for layer in range(layers):
        for plane in kv(layer):
            plane[frame, block_size // 2 :] = 0


def wrong_block(kv: Any, slot: Slots, length: int, block_size: int, layers: int) -> None:
    """A wrong frame in a table: a full block reads what the one before it holds.

    (Two blocks that merely changed places would be no fault: each key carries its position.)
    """
    wrong, _ = slot((length // block_size - 2) * block_size)
    other, _ = slot((length // block_size - 3) * block_size)
    for layer in range(layers):
        for plane in kv(layer):
            plane[wrong] = plane[other]


def lost_block(kv: Any, slot: Slots, length: int, block_size: int, layers: int) -> None:
    """A block that never arrived: zeros where the last full block should be."""
    frame, _ = slot((length // block_size - 1) * block_size)
    for layer in range(layers):
        for plane in kv(layer):
            plane[frame] = 0


FAULTS = {
    fault.__name__.replace("_", "-"): fault
    for fault in (
        one_slot_of_one_layer,
        one_key_of_one_layer,
        one_slot_of_all_layers,
        half_a_block,
        wrong_block,
        lost_block,
    )
}


class Faulty:
    """Wraps a model: plants `fault` in the first sequence that has computed `after` tokens.

    `planted` says whether it came to that.
    """

    def __init__(
        self, model: Callable[[Any], torch.Tensor], manager: Any, fault: str, *, after: int
    ) -> None:
        self.model = model
        self.manager = manager
        self.fault = FAULTS[fault]
        self.after = after
        self.planted = False

    def __call__(self, step: Any) -> torch.Tensor:
        if not self.planted:
            for row, sequence in enumerate(step.seqs):
                if sequence.num_computed >= self.after:
                    self._plant(step, row, sequence.num_computed)
                    break
        return self.model(step)

    def _plant(self, step: Any, row: int, length: int) -> None:
        config = self.manager.config
        table = step.block_table[row]

        def slot(position: int) -> tuple[int, int]:
            return int(table[position // config.block_size]), position % config.block_size

        self.fault(self.manager.kv, slot, length, config.block_size, config.num_layers)
        self.planted = True
