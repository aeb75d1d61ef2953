"""The simulated device: streams that run when a seeded scheduler says so, every order proven."""

from kvmem.store.sim.device import SimDevice
from kvmem.store.sim.faults import SimFault
from kvmem.store.sim.ops import SimFence
from kvmem.store.sim.scheduler import SimDeadlock

__all__ = ["SimDeadlock", "SimDevice", "SimFault", "SimFence"]
