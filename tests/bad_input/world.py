"""What a bad call is tried on: a Manager with a sequence in each state, a pin, an open step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.driver import Driver, GoodWork

SECRET = 987654321  # a token that no message may show
SECRET_NAME = "tenant-of-the-secret"


class World:
    """What a bad call may be tried on."""

    def __init__(self) -> None:
        self.d = Driver(device_blocks=12, host_blocks=8)
        self.other = Driver()
        self.m = self.d.manager
        self.seq = self.d.create([SECRET, *range(6)])
        self.swapped = self.d.create([SECRET, *range(10, 16)])
        self.busy = self.d.create([SECRET, *range(20, 25)], namespace=SECRET_NAME)
        self.d.step([self.seq, self.swapped, self.busy])
        self.transfer = self.m.swap_out([self.swapped])
        self.waiting = self.d.create([SECRET, 5, 6])
        self.huge = self.d.create(np.arange(49, dtype=np.int32))
        self.drafted = self.d.create([1, 2])
        self.d.step([self.drafted])
        self.m.append([self.drafted], [3, 4], counts=[2], draft=True)
        self.freed = self.d.create([7])
        self.d.free(self.freed)
        self.foreign = self.other.create([8])
        self.pin = self.d.pin(self.seq)
        self.released = self.m.pin(self.seq)
        self.released.release()
        self.ended = self.d.step([])
        self.m.append([self.busy], [SECRET])
        self.open = self.m.step([self.busy]).__enter__()
        self.d.wait()

    def end(self, seed: int) -> None:
        """Good work and DRAIN on the same Manager."""
        self.d.run(self.open)
        self.open.__exit__(None, None, None)
        self.m.accept([self.drafted], [1], [5])
        self.d.free(self.huge)
        self.m.verify()
        GoodWork(self.d, seed).run(50)
        self.d.check_content()
        for driver in (self.d, self.other):
            with driver:
                pass

    def abandon(self) -> None:
        self.open.cancel()
        self.m.close()
        self.other.manager.close()


def key(w: World, **change: Any) -> torch.Tensor:
    """A K of the right shape for the open step, with one thing changed."""
    shape = change.get("shape", (1, 1, 4))
    return torch.zeros(shape, dtype=change.get("dtype", torch.float32))


def query(heads: int = 2, tokens: int = 1, width: int = 4, **change: Any) -> torch.Tensor:
    return torch.zeros(tokens, heads, width, **change)


Bad = Callable[[World], object]
# name, call, error, pattern of the message
Case = tuple[str, Bad, type[Exception] | tuple[type[Exception], ...], str]
