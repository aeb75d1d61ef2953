"""Bytes: arenas, devices, streams, fences and copies. Runs the plans that the ledger makes."""

from kvmem.store.store import DEVICE, HOST, Store

__all__ = ["DEVICE", "HOST", "Store"]
