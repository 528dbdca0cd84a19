"""Leak tests at run time, exact to the byte. Needs torch and the standard library; copied beside generated tests."""

from .errors import Culprit, CycleGarbage, InjectedFault, Leak, Mismatch
from .ledger import Level, Steady, assert_no_growth

__all__ = ["Culprit", "CycleGarbage", "InjectedFault", "Leak", "Level", "Mismatch", "Steady", "assert_no_growth"]
