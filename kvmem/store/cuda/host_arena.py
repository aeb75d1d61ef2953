"""Host memory that a GPU copies from and to: exact, page-locked as far as the system allows."""

from __future__ import annotations

from kvmem.store.arena import Arena
from kvmem.store.cuda.api import Cuda
from kvmem.store.cuda.pinning import Pinned


class HostArena(Arena):
    """An arena that is page-locked for CUDA's copies, and unlocked before it is unmapped.

    Where locking is refused the rest stays pageable: copies of it are right, but not beside
    compute, and slower. ``pinned.reason`` says why, once in the log too.
    """

    def __init__(self, cuda: Cuda, name: str, num_frames: int, frame_bytes: int) -> None:
        super().__init__(name, num_frames, frame_bytes)
        self.pinned = Pinned(cuda.runtime, self.address, self.num_bytes)

    def close(self) -> None:
        """Unlock, then give the memory back. The device must be done with it."""
        self.pinned.unpin()
        super().close()
