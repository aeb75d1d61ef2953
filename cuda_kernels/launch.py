"""Launching parallel twins safely from several Python threads.

Numba's `workqueue` threading layer aborts the process when two threads enter parallel code at
once (tried: exit status 134), and it is what a machine without OpenMP and TBB falls back to. Where
the layer isn't thread-safe, parallel twins therefore run one at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

# The one process-wide object of the package: it guards a process-wide resource, Numba's pool.
_POOL_LOCK = threading.Lock()


def layer_is_threadsafe() -> bool:
    """Say whether Numba's threading layer is known to allow concurrent parallel regions.

    Before the first parallel launch of the process the layer isn't chosen yet: False.
    """
    import numba

    try:
        return numba.threading_layer() != "workqueue"
    except ValueError:
        return False


def launch_parallel(kernel: Callable[..., Any], *arguments: Any) -> None:
    """Call a parallel twin, under the process's lock where the threading layer needs one."""
    if layer_is_threadsafe():
        kernel(*arguments)
        return
    with _POOL_LOCK:
        kernel(*arguments)
