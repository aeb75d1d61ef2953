"""What an error of CUDA does to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmem.errors import KVMemError

if TYPE_CHECKING:
    from kvmem.store.cuda.device import CudaDevice


class Guard:
    """An error of CUDA in the body fails the device and becomes ``DeviceUnavailable``; with
    ``survivable`` only if it lasts."""

    def __init__(self, device: CudaDevice, what: str, *, survivable: bool = False) -> None:
        self._device, self._what, self._survivable = device, what, survivable

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, KVMemError):
            return
        if not self._survivable or self._device.is_lost():
            self._device._fail(error)
            self._device.check(self._what)
