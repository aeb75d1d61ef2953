"""All checks, one after the other; none can stop the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import kvmem
from kvmem.doctor.compiled import check_cache, check_threads
from kvmem.doctor.cuda import check_cuda
from kvmem.doctor.devices import DEFAULT_PIN_BYTES, check_gpus, check_pinning
from kvmem.doctor.finding import SEVERITIES, Finding, published
from kvmem.doctor.memory import check_host
from kvmem.doctor.versions import check_packages, check_python, check_shim
from kvmem.report.gpu import read_gpus
from kvmem.report.reasons import in_words

Check = Callable[[], list[Finding]]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What all checks found."""

    version: str  # of kvmem
    findings: tuple[Finding, ...]

    @property
    def worst(self) -> str:
        """The highest severity there is."""
        return max((f.severity for f in self.findings), key=SEVERITIES.index, default="ok")

    def count(self, severity: str) -> int:
        """How many findings have this severity."""
        return sum(finding.severity == severity for finding in self.findings)

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return {**asdict(self), "worst": self.worst}


def diagnose(
    *, pin_bytes: int = DEFAULT_PIN_BYTES, progress: Callable[[str], None] | None = None
) -> Diagnosis:
    """Run all checks. Never raises for what it finds.

    ``pin_bytes``: how much pinned memory to try where there is CUDA. ``progress`` hears of each
    check. Imports torch and numba; with CUDA it makes a context. Cost: some seconds.
    """
    gpus = read_gpus()
    checks: Sequence[tuple[str, Check]] = (
        ("python", check_python),
        ("packages", check_packages),
        ("pynvml", check_shim),
        ("gpus", partial(check_gpus, gpus)),
        ("cuda", partial(check_cuda, gpus)),
        ("host", partial(check_host, has_gpu=bool(gpus.devices))),
        ("pinned memory", partial(check_pinning, pin_bytes)),
        ("threading layer", check_threads),
        ("compile cache", check_cache),
    )
    return Diagnosis(kvmem.__version__, tuple(run_checks(checks, progress)))


def run_checks(
    checks: Sequence[tuple[str, Check]], progress: Callable[[str], None] | None = None
) -> list[Finding]:
    """The findings of ``checks``, cleaned. A check that breaks is a finding itself."""
    found: list[Finding] = []
    for name, check in checks:
        if progress is not None:
            progress(name)
        try:
            found += check()
        except Exception as error:
            words = f"the check broke: {type(error).__name__}: {in_words(error)}"
            found.append(Finding(name, "warning", words, "report it, with this text"))
    return [published(finding) for finding in found]
