"""What a Config will take, computed before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from kvmem.geometry import blocks_for, total_blocks
from kvmem.sizes import with_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePlan:
    """Sizes of the two tiers of a Config, and the bound under which swapping never gets stuck.

    Bytes are exact: the arenas are allocated with these sizes. ``metadata_bytes`` is an upper
    bound, without the block tables of live sequences, which grow with use. A fork that writes into
    a block it shares needs one block more until that step ends: count it in its final blocks.
    """

    block_size: int  # tokens a block
    token_bytes: int  # K and V of one token over all layers
    block_bytes: int  # one frame, padding of planes included
    device_blocks: int
    device_tokens: int  # room of the tier; also the longest sequence that can ever run
    device_bytes: int  # the arena, reserved frames included
    host_blocks: int  # 0: no host tier
    host_tokens: int
    host_bytes: int
    metadata_bytes: int  # of the ledger, over the blocks of both tiers
    warnings: tuple[str, ...] = ()  # sizes that make the host tier useless under the policy

    @property
    def bound(self) -> str:
        """In words and numbers: when the two tiers can never both be too full to go on."""
        if not self.host_blocks:
            return (
                f"never stuck while the final blocks of all live sequences fit the device: "
                f"sum <= {self.device_blocks}"
            )
        return (
            f"never stuck while the live sequences' final blocks <= {self.host_blocks} host blocks "
            f"+ those of the longest, and the longest has <= {self.device_blocks} blocks "
            f"({self.device_tokens} tokens)"
        )

    def never_stuck(self, final_tokens: Iterable[int]) -> bool:
        """Whether sequences that end at these lengths, all live at once, keep within the bound.

        Shared blocks are counted once per sequence, so True is a promise and False is not a
        verdict. Cost: one pass.
        """
        lengths = list(final_tokens)
        longest = blocks_for(max(lengths, default=0), self.block_size)
        total = total_blocks(lengths, self.block_size)
        if not self.host_blocks:
            return total <= self.device_blocks
        return longest <= self.device_blocks and total <= self.host_blocks + longest

    def to_dict(self) -> dict[str, int | str | tuple[str, ...]]:
        """All sizes and the bound, ready for JSON."""
        return {**asdict(self), "bound": self.bound}

    def __str__(self) -> str:
        rows = [
            ("token", f"{with_unit(self.token_bytes)} of K and V over all layers"),
            ("block", f"{with_unit(self.block_bytes)} for {self.block_size} tokens"),
            ("device", _tier(self.device_blocks, self.device_tokens, self.device_bytes)),
            ("host", _tier(self.host_blocks, self.host_tokens, self.host_bytes)),
            ("metadata", f"at most {with_unit(self.metadata_bytes)} beside the block tables"),
            ("bound", self.bound),
            *(("warning", text) for text in self.warnings),
        ]
        return "\n".join(f"{name:<9} {text}" for name, text in rows)


def _tier(blocks: int, tokens: int, num_bytes: int) -> str:
    if not blocks:
        return "none (host_blocks or host_memory enables it)"
    return f"{blocks} blocks, {tokens} tokens, {with_unit(num_bytes)}"
