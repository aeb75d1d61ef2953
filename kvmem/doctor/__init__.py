"""What would stop kvmem on this machine, or slow it down, and what to do about it.

``diagnose()`` runs all checks; each finding has a severity and, unless all is well, an advice. The
text can be pasted into an issue: it holds no user name, host name, path of a home folder, device
serial or password. ``kvmem doctor`` prints it.
"""

from kvmem.doctor.doctor import Diagnosis, diagnose
from kvmem.doctor.finding import SEVERITIES, Finding

__all__ = ["SEVERITIES", "Diagnosis", "Finding", "diagnose"]
