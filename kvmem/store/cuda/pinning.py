"""Page-locks the memory of a host arena, so that copies with it need no CPU (CUDA: "pinned").

The memory is registered chunk by chunk, from its start: one call for hundreds of GiB holds locks of
the driver for minutes, in other processes too, and fails from 512 GiB on. Where the system refuses,
what is page-locked by then stays, the rest is pageable: copies with it are legal, slower, and block
the thread that submits them.

A copy must lie in one registration, or in none: CUDA refuses one that spans two of them, or the
page-locked and the pageable part. `Pinned.split` cuts copies where they must be cut.

**Order of an end**: first wait for the copies, then `Pinned.unpin`, then `Arena.close`. An arena
gives its pages back when it closes; a registration that still stood then would go on naming the old
pages, and whatever is mapped to the same addresses later would be copied from and to them. `Pinned`
holds a view of the memory until then, so the mapping itself can't end before.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import platform
import re
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvmem.errors import DeviceUnavailable, TierError
from kvmem.sizes import with_unit

LOG = logging.getLogger("kvmem")

#: Bytes of one registration. About 50 ms of the driver's locks at 0.1 s a GiB, as published.
CHUNK_BYTES = 512 << 20

#: Called with (bytes page-locked, bytes in all) after each chunk.
Progress = Callable[[int, int], object]

#: What the system may refuse; any other error means that the device is of no use.
REFUSALS = frozenset(
    {
        "cudaErrorMemoryAllocation",  # a limit of locked memory, of WSL, or no memory
        "cudaErrorNotSupported",
        "cudaErrorNotPermitted",
        "cudaErrorHostMemoryAlreadyRegistered",
        "cudaErrorInvalidValue",  # some drivers, for a size that they can't take
        "cudaErrorAlreadyMapped",  # Windows' driver, where its share of locked memory is used up
        "cudaErrorMapBufferObjectFailed",
        "cudaErrorOperatingSystem",
    }
)
#: An end that came before ours took the registration with it.
_GONE = frozenset({"cudaErrorCudartUnloading", "cudaErrorContextIsDestroyed"})
_NOT_REGISTERED = "cudaErrorHostMemoryNotRegistered"

_MBIND = {"x86_64": 237, "aarch64": 235}  # libc has no function for it
_MPOL_PREFERRED, _MPOL_MF_MOVE = 1, 2
_MASK_WORDS = 16  # the kernel knows at most 1,024 nodes
_PCI_ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", re.ASCII)


class Pinned:
    """The page-locked part of some memory: its first ``num_bytes`` bytes. Made by `pin`.

    ``reason``: why it is not all, None if it is. ``error``: the name of CUDA's error then.
    ``numa_reason``: why the memory was not bound to the node asked for, None if it was, or if none
    was asked for. Thread-safe.
    """

    def __init__(self, cudart: Any, memory: NDArray[np.uint8], chunk_bytes: int) -> None:
        if not memory.flags.c_contiguous:
            raise ValueError(f"memory has strides {memory.strides}; allowed: C-contiguous")
        if memory.ctypes.data % mmap.PAGESIZE:
            raise ValueError(f"memory starts at {memory.ctypes.data:#x}; allowed: a whole page")
        if chunk_bytes <= 0 or chunk_bytes % mmap.PAGESIZE:
            raise ValueError(
                f"chunk_bytes={chunk_bytes}; allowed: positive multiples of {mmap.PAGESIZE}"
            )
        self.num_bytes = 0
        self.reason: str | None = None
        self.error: str | None = None
        self.numa_reason: str | None = None
        self._cudart = cudart
        self._memory: NDArray[np.uint8] | None = memory
        self._address, self._total_bytes = memory.ctypes.data, memory.nbytes
        self._chunk_bytes = chunk_bytes
        self._chunks: list[int] = []  # addresses of registrations, in order
        self._lock = threading.RLock()  # a finalizer may come in the middle of an unpin
        self._pid = os.getpid()

    def is_pinned(self, offset: int, num_bytes: int) -> bool:
        """Whether all of ``[offset, offset + num_bytes)`` is page-locked now."""
        return offset >= 0 and num_bytes >= 0 and offset + num_bytes <= self.num_bytes

    @property
    def cuts(self) -> NDArray[np.int64]:
        """The offsets that no copy may span, ascending: between two registrations, and between
        the page-locked part and the rest. O(chunks)."""
        cuts = np.arange(self._chunk_bytes, self.num_bytes, self._chunk_bytes, dtype=np.int64)
        if 0 < self.num_bytes < self._total_bytes:
            return np.append(cuts, self.num_bytes)
        return cuts

    def split(
        self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Cut runs of bytes, int64 ``[runs]`` each, where a copy must not span.

        Returns (run, offset, size) of each piece, int64 ``[pieces]``, in the order of the runs and
        ascending in each: piece i is part of run ``run[i]`` and starts ``offset[i] -
        offsets[run[i]]`` bytes behind its start. Empty runs stay. O(chunks + runs log chunks).
        """
        cuts = self.cuts
        first = np.searchsorted(cuts, offsets, side="right")
        last = np.maximum(np.searchsorted(cuts, offsets + sizes, side="left"), first)
        counts = last - first + 1
        runs = np.repeat(np.arange(len(offsets)), counts)
        starts, ends = offsets[runs], (offsets + sizes)[runs]
        if len(runs) == len(offsets):
            return runs, starts, ends - starts
        place = np.arange(len(runs)) - np.repeat(np.cumsum(counts) - counts, counts)  # in its run
        inner = place > 0
        cut = cuts[first[runs[inner]] + place[inner] - 1]
        starts[inner] = cut
        ends[np.flatnonzero(inner) - 1] = cut
        return runs, starts, ends - starts

    def unpin(self) -> bool:
        """Unregister all of it, in reverse order, each chunk once; then a no-op. Never raises.

        Call it after the last copy has ended and before the arena closes. False: the driver did not
        unregister some chunk, which is logged, and the mapping then stays for the rest of the
        process, so that its addresses never name anything else. In a forked child it does nothing:
        the registrations are the parent's.
        """
        if os.getpid() != self._pid:  # before the lock, which may be held for ever in there
            return True
        with self._lock:
            self.num_bytes = 0
            failed = []
            while self._chunks:
                name = self._unregister(self._chunks.pop())
                if name is not None:
                    failed.append(name)
            released = all(name == _NOT_REGISTERED for name in failed)
            memory, self._memory = self._memory, None
            if not released and memory is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
            if failed:
                LOG.warning(
                    "%d chunks of page-locked host memory were not unregistered (%s)%s",
                    len(failed),
                    ", ".join(sorted(set(failed))),
                    "" if released else ": their addresses stay taken until the process ends",
                )
            return released

    # -- registering -------------------------------------------------------------------------------

    def _start(self, progress: Progress | None, cancelled: Callable[[], bool] | None) -> None:
        """Register chunk after chunk until the end, a refusal or a wish to stop."""
        while self.num_bytes < self._total_bytes:
            if cancelled is not None and cancelled():
                raise TierError(
                    f"page-locking host memory was cancelled after {with_unit(self.num_bytes)} of "
                    f"{with_unit(self._total_bytes)}; all of it is pageable again"
                )
            size = min(self._chunk_bytes, self._total_bytes - self.num_bytes)
            if not self._register(self._address + self.num_bytes, size):
                break
            self.num_bytes += size
            if progress is not None:
                progress(self.num_bytes, self._total_bytes)

    def _register(self, address: int, size: int) -> bool:
        """Whether the system agreed. Raises ``DeviceUnavailable`` for what is no refusal."""
        cudart = self._cudart
        # Before the call: an interrupt right behind it must not lose the chunk.
        self._chunks.append(address)
        (error,) = cudart.cudaHostRegister(address, size, cudart.cudaHostRegisterPortable)
        if not error:
            return True
        self._chunks.pop()
        # A refusal is this thread's last error as well: a later launch would report it as its own.
        # What is still there afterwards is of another kind: the context is lost.
        cudart.cudaGetLastError()
        (left,) = cudart.cudaGetLastError()
        if _name(error) not in REFUSALS or left:
            raise DeviceUnavailable(
                f"page-locking host memory failed: {_name(left or error)} at "
                f"{with_unit(self.num_bytes)} of {with_unit(self._total_bytes)}; this process can "
                f"use no CUDA device"
            )
        self.error = _name(error)
        self.reason = (
            f"{self.error}: {with_unit(self.num_bytes)} of {with_unit(self._total_bytes)} of host "
            f"memory are page-locked, copies with the rest are slower and block their caller; "
            f"{_advice(self.error)}"
        )
        LOG.warning("%s", self.reason)
        return False

    def _unregister(self, address: int) -> str | None:
        """Why a chunk may still be registered, None if it is not."""
        try:
            (error,) = self._cudart.cudaHostUnregister(address)
            if not error:
                return None
            self._cudart.cudaGetLastError()
        except Exception as failure:  # at the interpreter's exit the driver may have gone before us
            return type(failure).__name__
        return None if _name(error) in _GONE else _name(error)


def pin(
    cudart: Any,
    memory: NDArray[np.uint8],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
    numa_node: int | None = None,
) -> Pinned:
    """Page-lock ``memory``, the bytes of an arena (any shape, C-contiguous, on whole pages).

    ``cudart`` is ``cuda.bindings.runtime`` (or a double); a context must be current. Registrations
    hold in all contexts of the process. ``progress`` is called after each chunk, ``cancelled`` (a
    ``threading.Event``'s ``is_set``, say) asked before each. ``numa_node`` is preferred for pages
    not touched yet, and touched ones move there; it is a wish, not a bound: a node that is full
    must not get the process killed.

    A refusal is no error: one warning with the limit and its cure, and a shorter ``Pinned``.
    Raises ``TierError`` when cancelled, ``DeviceUnavailable`` when the device is lost, whatever
    ``progress`` raises, and ``ValueError`` for arguments that can't be; nothing stays registered
    then. Cost: about 0.1 s a GiB, which is mostly the first touch of the pages.
    """
    pinned = Pinned(cudart, memory, chunk_bytes)
    if numa_node is not None:
        pinned.numa_reason = prefer_node(memory, numa_node)
        if pinned.numa_reason is not None:
            LOG.warning("%s", pinned.numa_reason)
    try:
        pinned._start(progress, cancelled)
    except BaseException:
        pinned.unpin()
        raise
    return pinned


def _name(error: Any) -> str:
    """The name of an error code; its number where cuda.bindings knows no name for it."""
    return str(getattr(error, "name", error))


def _advice(name: str) -> str:
    """What limits locked memory here, and what to do about it."""
    if name == "cudaErrorHostMemoryAlreadyRegistered":
        return "something else in this process registered these addresses and never let go of them"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        cure = "this process may lock any amount, so the driver or a lack of free memory limits it"
    else:
        cure = (
            f"this process may lock {with_unit(limit)} (RLIMIT_MEMLOCK): ulimit -l unlimited; for "
            f"a container --ulimit memlock=-1; for a service LimitMEMLOCK=infinity"
        )
    return f"{cure}; under WSL, Windows has a limit of its own"


# -- NUMA ------------------------------------------------------------------------------------------


def prefer_node(memory: NDArray[np.uint8], node: int) -> str | None:
    """Ask the kernel for pages of one NUMA node; None if it agreed, else why not.

    Only this memory's policy changes, no thread's. Pages that were touched move. Raises
    ``ValueError`` for a node that no kernel has.
    """
    if not 0 <= node < _MASK_WORDS * 64:
        raise ValueError(f"numa_node={node}; allowed: 0 to {_MASK_WORDS * 64 - 1}")
    number = _mbind(memory.ctypes.data, memory.nbytes, node)
    if number == 0:
        return None
    why = errno.errorcode.get(number, str(number))
    cure = "; a container needs --cap-add SYS_NICE" if number == errno.EPERM else ""
    return f"host memory is not bound to NUMA node {node}: mbind gave {why}{cure}"


def _mbind(address: int, num_bytes: int, node: int) -> int:
    """The system call of that name: 0, or its error's number."""
    call = _MBIND.get(platform.machine())
    if call is None:
        return errno.ENOSYS
    mask = (ctypes.c_ulong * _MASK_WORDS)()
    mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(
        ctypes.c_long(call),
        ctypes.c_void_p(address),
        ctypes.c_ulong(num_bytes),
        ctypes.c_long(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(_MASK_WORDS * 64 + 1),  # the kernel takes one off
        ctypes.c_long(_MPOL_MF_MOVE),
    )
    return 0 if result == 0 else ctypes.get_errno()


def numa_node_of(pci_address: str, root: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The NUMA node that a PCI device hangs on; None if the kernel doesn't know, or has only one.

    Takes the forms of CUDA ("0000:65:00.0") and of NVML ("00000000:65:00.0"), in any case.
    Raises ``ValueError`` for what is no such address.
    """
    match = _PCI_ADDRESS.fullmatch(pci_address.strip().lower())
    if match is None:
        raise ValueError(
            f"pci_address={pci_address[:40]!r}; allowed: domain:bus:device.function, 0000:65:00.0"
        )
    domain = int(match[1] or "0", 16)
    try:
        node = int((root / f"{domain:04x}:{match[2]}" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
