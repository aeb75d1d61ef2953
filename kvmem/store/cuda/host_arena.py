"""Host memory that a GPU copies from and to: exact, page-locked as far as the system allows."""

from __future__ import annotations

from kvmem.numa import OF_GPU
from kvmem.store.arena import Arena
from kvmem.store.cuda.api import Cuda
from kvmem.store.cuda.arena import keep_for_good
from kvmem.store.cuda.pinning import Pinned, Progress, numa_node_of, pin


class HostArena(Arena):
    """An arena that is page-locked for CUDA's copies, and unlocked before it is unmapped.

    Where locking is refused the rest stays pageable: copies of it are right, but slower, and they
    hold up who submits them. ``pinned.reason`` says why, once in the log too. Raises as `pin`; the
    memory is given back then.
    """

    def __init__(
        self,
        cuda: Cuda,
        name: str,
        num_frames: int,
        frame_bytes: int,
        *,
        numa_node: int | str | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(name, num_frames, frame_bytes)
        # A forked child gets none of it: older kernels would part the pages that the GPU knows from
        # those that this process goes on writing to, newer ones copy all of them.
        self._advise("MADV_DONTFORK")
        try:
            with cuda.here():
                node = _node_of(cuda) if numa_node == OF_GPU else numa_node
                assert not isinstance(node, str)
                self.pinned: Pinned = pin(
                    cuda.runtime, self.bytes, progress=progress, numa_node=node
                )
        except BaseException:
            super().close()
            raise

    def close(self) -> None:
        """Unlock, then give the memory back. The device must be done with it."""
        if not self.closed:
            self.pinned.unpin()
        super().close()

    def abandon(self) -> None:
        """Close without unlocking or giving the memory back: the device is not done with it."""
        keep_for_good(self._memory, self._bytes, self.pinned)
        self._memory = self._bytes = None


def _node_of(cuda: Cuda) -> int | None:
    """The NUMA node that the GPU hangs on, None where nobody knows."""
    address: bytes | str = cuda.call("cudaDeviceGetPCIBusId", 32, cuda.ordinal)
    text = address.decode() if isinstance(address, bytes) else address
    return numa_node_of(text.rstrip("\0"))
