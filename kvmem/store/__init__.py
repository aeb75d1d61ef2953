"""Bytes: arenas, devices, streams, fences and copies. Runs the plans that the ledger makes."""

from kvmem.store.store import Store
from kvmem.store.transfer import DEVICE, HOST

__all__ = ["DEVICE", "HOST", "Store"]
