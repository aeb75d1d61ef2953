"""Swap pressure on a Manager for seconds to hours, each byte checked: below ``kvmem stress``.

``run_stress(StressOptions(seconds=10))`` answers a ``StressReport``. It uses what an engine may
use, the public calls of a Manager, and nothing else.
"""

from kvmem.stress.breach import Breach
from kvmem.stress.leaks import Leaks
from kvmem.stress.options import StressOptions
from kvmem.stress.report import StressProgress, StressReport
from kvmem.stress.run import run_stress

__all__ = ["Breach", "Leaks", "StressOptions", "StressProgress", "StressReport", "run_stress"]
