"""The store: one rank's bytes. It runs the ledger's plans on a device and answers what is done.

The way of a plan: ``submit`` queues its copies and returns; ``begin`` lets the compute stream wait
for what the step needs and copies on write; ``write`` and ``attend`` work; ``end`` records the
step's fence, which later copies wait for.
"""

from __future__ import annotations

import contextlib
import math
import threading
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from kvmem.errors import (
    CorruptEntry,
    DeviceUnavailable,
    ManagerClosed,
    NotResident,
    RaceError,
    TransferError,
)
from kvmem.fork import ForkGuard
from kvmem.geometry import RESERVED_FRAMES
from kvmem.store.arena import ArenaBase
from kvmem.store.device import Device, FrameIds, Moved, Stream, Ticket
from kvmem.store.layout import Layout, StoreConfig
from kvmem.store.making import Progress, make_parts
from kvmem.store.operands import Operands
from kvmem.store.order import StepFences, TransferQueue, check_frames, own_copy
from kvmem.store.transfer import DEVICE, HOST, Slice, Transfers
from kvmem.store.transfer_clock import TransferObserver

if TYPE_CHECKING:
    from kvmem.plan import Plan
    from kvmem.store.cuda.step_tensors import StepTensors

Direction = Literal["out", "in"]


class Store:
    """Arenas, a device and the order of its work (R3, R5, R6, R11). Thread-safe.

    Raises ``ConfigError`` when the memory is refused. Costs two mappings and two idle threads;
    pages are taken when they are first written (at once with ``debug``, which poisons them).
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        device: Device | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.layout = Layout.of(config)
        self.debug = config.debug
        self.num_blocks = (config.device_blocks, config.host_blocks)
        parts = make_parts(config, self.layout, device, progress)
        self.device = parts.device
        self._device_arena, self._host_arena = parts.device_arena, parts.host_arena
        self._compute = parts.compute
        self._kernels: Any = parts.kernels  # those of a GPU take `Operands` as well
        self._guards = parts.guards
        #: Where a step's arrays have to be uploaded: makes its tensors. None: they are the host's.
        self.step_tensors = parts.step_tensors
        #: Takes token ids that lie on the GPU (None for others); None where there is no GPU.
        self.sample = parts.sample
        # Guards the two below; held for a few list operations, never while anything waits.
        self._lock = threading.Lock()
        self._steps = StepFences(self.device)
        self._moves = Transfers(
            self.device, self.layout, (self._device_arena, self._host_arena), self._steps,
            checks=parts.checksums, filler=parts.filler,
        )  # fmt: skip
        self._transfers: dict[Direction, TransferQueue] = {
            "out": self._moves.out, "in": self._moves.into
        }  # fmt: skip
        self._closed = False
        self._fork = ForkGuard()

    # --- the order of work -------------------------------------------------------------------

    def submit(self, plan: Plan) -> None:
        """Queue the copies of a plan and open its step; never waits for a device.

        Plans come in the order in which the ledger made them: out and in ids grow by one each. The
        id arrays are copied, so the ledger may reuse its buffers at once (case 41).
        Raises ``ValueError`` for a plan that can't be, before anything is queued;
        ``DeviceUnavailable``, ``CorruptEntry`` or ``ManagerClosed`` when the device is no more.
        Cost: 150-200 us for a plan of 200 frames each way, 15 us for a step without copies.
        """
        self.check_usable()
        if not (plan.out_id or plan.in_id or len(plan.out_device) or len(plan.in_device)):
            with self._lock:
                if plan.step_after_in or plan.step_after_out or len(plan.fill_frames):
                    self._moves.check_order(plan)
                if plan.step_epoch:
                    self._steps.begin(plan.step_epoch)
            return
        with self._lock:
            self._moves.submit(plan, self._moves.checked(plan, self.num_blocks))
            if plan.step_epoch:
                self._steps.begin(plan.step_epoch)

    def begin(self, plan: Plan) -> list[Slice]:
        """Let the compute stream wait for what the plan's step needs, then copy on write (R3, R6).

        On the CPU device the calling thread is the compute stream: it waits here, under no lock.
        Returns the layers that are still under way, for `arrive`. Raises as ``submit`` when the
        device failed or was closed meanwhile.
        """
        self.check_usable()
        waits = plan.step_after_in or plan.step_after_out or len(plan.copy_source)
        if not waits and plan.step_epoch in self._steps.open:
            return []
        with self._lock:
            fences, slices = self._moves.arrivals(plan)
            if plan.step_epoch:
                self._steps.begin(plan.step_epoch)
        self._moves.after(Stream.COMPUTE, *fences)
        if len(plan.copy_source):
            self._copy_on_write(plan)
        return slices

    def arrive(self, slices: list[Slice], layer: int) -> None:
        """Let the compute stream wait for the slices up to a layer, and take them off the list."""
        while slices and slices[0].first_layer <= layer:
            self._moves.after(Stream.COMPUTE, slices.pop(0).fence)

    def end(self, step_epoch: int) -> None:
        """Record the fence of a step: all its work is on the compute stream. A second call: no-op.

        To be called for every step that was submitted or begun, also one whose body raised;
        legal after a failure of the device.
        """
        with self._lock:
            self._steps.end(step_epoch)

    def retired(self) -> tuple[int, int]:
        """The last out id and the last in id that are done, with all before them; never waits."""
        out, into = self._moves.out, self._moves.into
        last = out.last, into.last  # before `pending`: nothing later can be claimed
        if not (out.pending or into.pending):
            return last
        with self._lock:
            return self._moves.retired()

    def wait(self, direction: Direction, transfer_id: int, timeout: float | None = None) -> bool:
        """Wait on the host for a transfer and all before it; False when ``timeout`` s passed.

        Raises ``ValueError`` for an id never submitted, ``TransferError`` (``CorruptEntry``) when
        the transfer failed, ``ManagerClosed`` when the store was closed meanwhile.
        """
        self._check_open()
        if direction not in self._transfers:
            raise ValueError(f"direction {direction!r} is unknown; allowed: 'out', 'in'")
        if timeout is not None and not (timeout >= 0 or math.isinf(timeout)):
            raise ValueError(f"timeout {timeout} s; allowed: None or a number >= 0")
        with self._lock:
            fence = self._transfers[direction].submitted(transfer_id)
        if fence is None:
            return True
        try:
            return self.device.synchronize(fence, None if timeout == math.inf else timeout)
        except DeviceUnavailable as error:
            raise TransferError(str(error)) from self.error

    def wait_for_room(self, limit: int) -> None:
        """With ``limit`` transfers of a direction on the way: wait until half of them are done, or
        the device failed, which the next call tells."""
        for direction, queue in self._transfers.items():
            if len(queue.pending) >= limit:
                with contextlib.suppress(TransferError):
                    self.wait(direction, queue.last - limit // 2)

    @property
    def observers(self) -> tuple[TransferObserver, ...]:
        """Who hears of transfers when they end; mostly nobody."""
        return self._moves.observers

    @observers.setter
    def observers(self, observers: tuple[TransferObserver, ...]) -> None:
        self._moves.observers = observers

    @property
    def failed(self) -> list[Ticket]:
        """Copies that failed and were not handled yet, oldest first: who handles one takes it out.
        A transfer is there before its fence is reached (R5)."""
        return self.device.failed

    @property
    def error(self) -> BaseException | None:
        """What made the device fail, or None. A failed store stays failed (R8)."""
        return self.device.error

    def upload(self, arrays: Any) -> StepTensors:
        """The arrays of a step on the GPU, where `step_tensors` says that they have to be there.
        Queued on COMPUTE; raises as ``begin``. They stay as long as ``arrays`` are the step's."""
        self.check_usable()
        assert self.step_tensors is not None
        if arrays.kept is not None:
            arrays.kept.release()
            arrays.kept = None
        arrays.kept = self.step_tensors(arrays)
        return cast("StepTensors", arrays.kept)

    # --- bytes -------------------------------------------------------------------------------

    def write(
        self,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: NDArray[np.int64],
        on_device: Operands | None = None,
    ) -> None:
        """Store K ``[num_tokens, num_kv_heads, head_dim]`` and V (``value_dim``) of one layer.

        ``slot_mapping`` int64 ``[num_tokens]``: frame * block_size + offset, -1 skips the token.
        Both of the config's ``dtype``; narrowed to its ``kv_dtype`` where that is another.
        ``on_device``, for a GPU: the slots there; without it they are uploaded.
        Slots are trusted, except with ``debug``. Raises ``ShapeError`` or ``TypeError`` for a
        wrong tensor (with ``debug`` also for NaN), ``ValueError`` for a slot out of range; nothing
        is written then.
        """
        self._check_open()
        more = {} if on_device is None else {"on_device": on_device}
        self._kernels.write(layer, key, value, slot_mapping, **more)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        *,
        table: NDArray[np.int32],
        table_start: NDArray[np.int64],
        seq_lens: NDArray[Any],
        query_start: NDArray[Any],
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        alibi: ArrayLike | torch.Tensor | None = None,
        sinks: ArrayLike | torch.Tensor | None = None,
        return_lse: bool = False,
        out: torch.Tensor | None = None,
        on_device: Operands | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of a mixed batch over one layer's paged K/V, causal.

        ``query`` ``[num_tokens, num_heads, head_dim]`` of the config's dtype; block j of row i is
        frame ``table[table_start[i] + j]``; row i has ``query_start[i + 1] - query_start[i]``
        queries, the last ones of its ``seq_lens[i]`` tokens (int32 or int64). Returns
        ``[num_tokens, num_heads, value_dim]`` (in ``out`` if given) and with ``return_lse`` the
        natural log-sum-exp, float32 ``[num_tokens, num_heads]``. Tables are checked (case 69),
        but for those that lie on a GPU already (``on_device``).
        Raises ``ShapeError``, ``TypeError`` or ``ValueError`` before anything is computed.
        """
        self._check_open()
        more = {} if on_device is None else {"on_device": on_device}
        return self._kernels.attend(
            layer,
            query,
            table=table,
            table_start=table_start,
            seq_lens=seq_lens,
            query_start=query_start,
            scale=scale,
            window=window,
            softcap=softcap,
            alibi=alibi,
            sinks=sinks,
            return_lse=return_lse,
            out=out,
            **more,
        )

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of K and V of a layer in the device arena, frame 0 (the null frame) included.

        ``[device_blocks + 1, block_size, num_kv_heads, head_dim | value_dim]`` of the ``kv_dtype``,
        strided, no copy; in fp8_e4m3 still divided by the scales.
        A simulated device first runs its compute stream, and sees no access by such a view.
        """
        self.device.settle(Stream.COMPUTE)
        return self._views(DEVICE, layer)

    def block_view(self, tier: int, frame: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of K and V of a layer in one frame: ``[block_size, num_kv_heads, dim]``.

        Raises ``ValueError`` for a frame out of range, ``NotResident`` for a tier that is off.
        The bytes of a frame under a copy are in motion: ``wait`` for it first, else a simulated
        device raises ``RaceError``.
        """
        key, value = self._views(tier, layer)
        if not RESERVED_FRAMES <= frame <= self.num_blocks[tier]:
            raise ValueError(
                f"frame {frame} is out of range; tier {tier} has frames 1 to "
                f"{self.num_blocks[tier]}"
            )
        arena = self._device_arena if tier == DEVICE else self._host_arena
        self.device.read_back(cast(ArenaBase, arena), np.array([frame], np.int32))
        return key[frame], value[frame]

    # --- state -------------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """Blocks and bytes moved up to now, counted at the device when the work had ended.

        ``out_*`` device to host, ``in_*`` host to device, ``copied_*`` on the device (copy on
        write; its bytes are those of the filled slots). ``*_runs`` are contiguous pieces of these,
        ``*_arena_bytes`` is the memory of a tier; then what `Device.transfer_counts` tells.
        """
        self._check_open()
        counts: dict[str, int] = {}
        names = (("out", Stream.OUT), ("in", Stream.IN), ("copied", Stream.COMPUTE))
        for name, stream in names:
            moved = self.device.moved(stream)
            counts[f"{name}_blocks"] = moved.frames
            counts[f"{name}_bytes"] = moved.num_bytes
            counts[f"{name}_runs"] = moved.runs
        counts["device_arena_bytes"] = self._device_arena.num_bytes
        counts["host_arena_bytes"] = self._host_arena.num_bytes if self._host_arena else 0
        return counts | self.device.transfer_counts()

    def arenas(self) -> dict[str, ArenaBase]:
        """The arenas by the name of their tier, for reports. Raises ``ManagerClosed``."""
        self._check_open()
        both = {"device": self._device_arena, "host": self._host_arena}
        return {name: arena for name, arena in both.items() if arena is not None}

    def check_guards(self, free: FrameIds | None = None) -> list[str]:
        """Breaches of the guard and null frames, and of device frames that are free and whose
        fill is known to be done, in words; empty without ``debug``."""
        self._check_open()
        if self._guards is None:
            return []
        if free is None or not len(free):
            return self._guards.breaches()
        self.device.read_back(self._device_arena, free)
        return self._guards.breaches() + self._guards.written(free)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def close(self) -> None:
        """Abandon what is queued, end the workers within 5 s, give the memory back; then a no-op.

        In a forked child: a no-op, the memory is the parent's.
        """
        if self._closed or self._fork.in_child:
            return
        self._closed = True
        self.device.close()
        self._device_arena.close()
        if self._host_arena is not None:
            self._host_arena.close()

    # --- inside ------------------------------------------------------------------------------

    def _copy_on_write(self, plan: Plan) -> None:
        source, target = own_copy(plan.copy_source), own_copy(plan.copy_target)
        tokens = own_copy(plan.copy_tokens)
        check_frames("copy_source", source, self.num_blocks[DEVICE])
        check_frames("copy_target", target, self.num_blocks[DEVICE])
        arena = self._device_arena
        self.device.launch(
            Stream.COMPUTE,
            self._compute.copy_on_write(source, target, tokens),
            reads=((arena, source),),
            writes=((arena, target),),
            moved=Moved(len(source), int(tokens.sum()) * self.layout.token_bytes, len(source)),
        )

    def _views(self, tier: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._check_open()
        if not 0 <= layer < self.layout.num_layers:
            raise ValueError(
                f"layer {layer} does not exist; allowed: 0 to {self.layout.num_layers - 1}"
            )
        if tier not in (DEVICE, HOST):
            raise ValueError(f"tier {tier} is unknown; allowed: {DEVICE} (device), {HOST} (host)")
        arena = self._device_arena if tier == DEVICE else self._host_arena
        if arena is None:
            raise NotResident("the host tier is off; set host_blocks or host_memory to have one")
        frames = self.num_blocks[tier] + RESERVED_FRAMES
        return self.layout.views(arena.typed(self.layout.dtype)[:frames], layer)

    def _check_open(self) -> None:
        if self._closed or self._fork.in_child:
            what = "was closed" if self._closed else "belongs to the process that made it"
            raise ManagerClosed(f"the store {what}; make a new Manager here")

    def check_usable(self) -> None:
        """Raise what closed the store or made its device fail (R8); cheap."""
        self._check_open()
        error = self.device.error
        if error is not None:
            if isinstance(error, RaceError):
                raise error.again() from error
            kind = CorruptEntry if isinstance(error, CorruptEntry) else DeviceUnavailable
            raise kind(
                f"the device failed and the store with it: {str(error)[:160]}; close this "
                "Manager and make a new one"
            ) from error
