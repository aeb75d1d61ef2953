"""Whether this process is a forked child of the one that made an object.

A child has neither the threads nor the locks of its parent, so a Manager refuses to work there.
Asking the system for the process id at each call costs half a microsecond or more; here the fork
itself tells.
"""

from __future__ import annotations

import os
import weakref


class ForkGuard:
    """`in_child` becomes True in a child made by `os.fork` (or multiprocessing's "fork").

    Python offers no way to take a fork handler back: about 100 bytes stay for each guard.
    """

    __slots__ = ("__weakref__", "in_child")

    def __init__(self) -> None:
        self.in_child = False
        if hasattr(os, "register_at_fork"):
            me = weakref.ref(self)

            def mark() -> None:
                guard = me()
                if guard is not None:
                    guard.in_child = True

            os.register_at_fork(after_in_child=mark)
