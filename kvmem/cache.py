"""The user's side of the prefix cache: asking what is cached, keeping it, letting it go."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvmem.errors import PinError
from kvmem.ledger import Refusal
from kvmem.tokens import TokenArray, namespace_key

if TYPE_CHECKING:
    from kvmem.runtime import Ids, Runtime


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt is cached. `num_tokens` = `on_device` + `on_host`, whole blocks."""

    num_tokens: int
    on_device: int  # tokens whose blocks have a device frame
    on_host: int  # tokens that would have to be copied in first


class Pin:
    """Keeps cached blocks on the device until `release()` or the end of a `with` block.

    `num_tokens` says how many tokens it covers. One dropped without release warns
    (ResourceWarning) and is released at the Manager's next call.
    """

    def __init__(self, runtime: Runtime, blocks: Ids) -> None:
        self._runtime = runtime
        self._blocks = blocks
        self._released = False
        self.num_tokens = len(blocks) * runtime.config.block_size

    def release(self) -> None:
        """Let the blocks go; they stay cached until evicted. Raises PinError the second time."""
        runtime = self._runtime
        with runtime.entered():
            if self._released:
                raise PinError("this Pin was released before; pin again for a new one")
            self._released = True
            runtime.pins.discard(self)
            runtime.submit(runtime.ledger.change_pins(self._blocks, -1))

    @property
    def released(self) -> bool:
        """True after `release()`."""
        return self._released

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._released and not self._runtime.closed:
            self.release()

    def __repr__(self) -> str:
        state = "released" if self._released else "live"
        return f"<Pin {self.num_tokens} tokens {state}>"

    def __del__(self) -> None:
        if not getattr(self, "_released", True) and not self._runtime.closed:
            self._runtime.unpinned.append(self._blocks)
            warnings.warn(
                f"a Pin of {self.num_tokens} tokens was dropped without release()",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )


def find(runtime: Runtime, tokens: TokenArray, namespace: object) -> Ids:
    """The cached blocks of a prompt, by id. No side effect. O(tokens hit)."""
    ledger = runtime.ledger
    key = namespace_key(namespace)
    if not ledger.knows_namespace(key):
        return np.zeros(0, np.int32)
    record = ledger.create(tokens, namespace=key, publish=False)
    found = ledger.look_up(record)
    runtime.submit(ledger.free(np.array([record], np.int32)))
    return found


def match(runtime: Runtime, tokens: TokenArray, namespace: object) -> Match:
    """See Manager.match."""
    found = find(runtime, tokens, namespace)
    block_size = runtime.config.block_size
    frames = runtime.ledger.state.blocks["device_frame"][found]
    on_device = int(np.count_nonzero(frames)) * block_size
    total = len(found) * block_size
    return Match(total, on_device, total - on_device)


def pin_blocks(runtime: Runtime, blocks: Ids) -> Pin:
    """Pin the leading blocks that are on the device. Raises PinError when there is none."""
    frames = runtime.ledger.state.blocks["device_frame"][blocks]
    missing = np.flatnonzero(frames == 0)
    if len(missing):
        blocks = blocks[: int(missing[0])]
    if not len(blocks):
        raise PinError(
            "pin: nothing of it is cached on the device; compute or swap it in first (only full, "
            "published blocks can be pinned)"
        )
    try:
        runtime.submit(runtime.ledger.change_pins(blocks, 1))
    except Refusal as refusal:
        raise runtime.explain(refusal, [], "pin") from None
    pin = Pin(runtime, blocks)
    runtime.pins.add(pin)
    return pin


def published_blocks(runtime: Runtime, record: int) -> Ids:
    """The leading published blocks of a sequence."""
    count = int(runtime.ledger.state.sequences["num_published"][record])
    return runtime.ledger.table_of(record)[:count]
