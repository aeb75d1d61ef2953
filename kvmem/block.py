"""`Block`: a view of one block, with the field names of the founding document."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvmem.checks import integer
from kvmem.errors import NotResident
from kvmem.ledger.state import DEVICE, GROUP, HOST

if TYPE_CHECKING:
    from kvmem.runtime import Runtime

FREE, USED, PINNED = "FREE", "USED", "PINNED"


class Block:
    """What a block is right now. Each field is read when asked for; a block may change owner.

    States: "PINNED" (a live Pin keeps it on the device), "USED" (a table names it), "FREE" (no
    owner; its content may still be cached, see `is_cached`).
    """

    def __init__(self, runtime: Runtime, block_id: int) -> None:
        self._runtime = runtime
        self.block_id = block_id

    @property
    def ref_count(self) -> int:
        """Tables that name it (and open steps that copied it on write)."""
        return self._field("ref_count")

    @property
    def num_pins(self) -> int:
        """Live pins that name it."""
        return self._field("num_pins")

    @property
    def num_valid_tokens(self) -> int:
        """Filled slots, from offset 0."""
        return self._field("num_tokens")

    @property
    def state(self) -> str:
        """ "FREE", "USED" or "PINNED"; computed, never stored."""
        if self.num_pins:
            return PINNED
        return USED if self.ref_count else FREE

    @property
    def is_cached(self) -> bool:
        """True when the trie serves it."""
        live = self._field("device_frame") or self._field("host_frame")
        return bool(live and self._field("node"))

    @property
    def device(self) -> str:
        """Where its content is: "device", "host", "device+host" or "none"."""
        fields = (("device", "device_frame"), ("host", "host_frame"))
        return "+".join(name for name, field in fields if self._field(field)) or "none"

    @property
    def frame_ids(self) -> tuple[int, int]:
        """Its frames (device, host); 0: none there."""
        return self._field("device_frame"), self._field("host_frame")

    @property
    def seq_ids(self) -> list[int]:
        """Ids of the sequences whose table names it. O(all table entries)."""
        return [seq_id for seq_id, _ in self._owners()]

    @property
    def slot_mapping(self) -> list[tuple[int, bool]]:
        """For each filled slot: the token's position, and whether the slot belongs to a shared
        prefix (published, or named by more than one table). Empty without an owner."""
        owners = self._owners()
        if not owners:
            return []
        shared = self.is_cached or self.ref_count > 1
        first = owners[0][1] * self._runtime.config.block_size
        return [(first + i, shared) for i in range(self.num_valid_tokens)]

    def k_data(self, layer: int) -> torch.Tensor:
        """K of a layer, `[block_size, num_kv_heads, head_dim]`, a view of the device arena.

        Slots past `num_valid_tokens` hold anything; what fp8_e4m3 holds is k / k_scale. Raises
        NotResident without a device frame.
        """
        return self._data(layer)[0]

    def v_data(self, layer: int) -> torch.Tensor:
        """V of a layer, `[block_size, num_kv_heads, v_head_dim]`; else as `k_data`."""
        return self._data(layer)[1]

    def host_data(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer in the host tier. Raises NotResident without a host copy."""
        frame = self._field("host_frame")
        if not frame:
            raise NotResident(f"block {self.block_id} has no host copy; swap it out first")
        return self._runtime.store.block_view(HOST, frame, self._layer(layer))

    def _data(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        frame = self._field("device_frame")
        if not frame:
            raise NotResident(
                f"block {self.block_id} has no device frame (it is on: {self.device}); swap its "
                f"sequence in first"
            )
        return self._runtime.store.block_view(DEVICE, frame, self._layer(layer))

    def _layer(self, layer: object) -> int:
        return integer("layer", layer, low=0, high=self._runtime.config.num_layers - 1)

    def _owners(self) -> list[tuple[int, int]]:
        """(sequence id, table index) of each table entry naming it."""
        with self._runtime.lock:
            state = self._runtime.ledger.state
            owners = []
            for record in np.flatnonzero(state.sequences["state"]):
                table = state.tables[record, GROUP]
                start, count = int(table["start"]), int(table["num_blocks"])
                for i in np.flatnonzero(state.table[start : start + count] == self.block_id):
                    owners.append((int(state.sequences["arrival"][record]), int(i)))
            return owners

    def _field(self, name: str) -> int:
        self._runtime.check_open()
        return int(self._runtime.ledger.state.blocks[name][self.block_id])

    def __repr__(self) -> str:
        return f"<Block {self.block_id} {self.state} on {self.device} refs {self.ref_count}>"
