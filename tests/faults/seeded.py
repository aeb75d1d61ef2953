"""All planted faults by name, in the order of their modules."""

from __future__ import annotations

from tests.faults import seeded_content, seeded_steps, seeded_tiers
from tests.faults.plant import FAULTS

MODULES = (seeded_content, seeded_steps, seeded_tiers)

__all__ = ["FAULTS", "MODULES"]
