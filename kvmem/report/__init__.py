"""Memory of GPUs, processes, torch, a Manager's arenas and the host, in one report.

``memory_report()`` never raises for what it can't find out: such a field is None, and the record's
``reasons`` say why. ``kvmem report`` prints the same. It needs neither torch nor a GPU.
"""

from kvmem.report.report import MemoryReport, memory_report

__all__ = ["MemoryReport", "memory_report"]
