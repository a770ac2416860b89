"""Checks of one node: what is found, and what to change. Nothing here changes anything."""

from dualpath.doctor.checks import diagnose
from dualpath.doctor.finding import Finding, Level

__all__ = ["Finding", "Level", "diagnose"]
