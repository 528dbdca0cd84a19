# poolaudit leaktests, sha256 dc0bf6f3874cc171: written again as long as that is the digest of the rest
"""Leak tests at run time, exact to the byte. Needs torch and the standard library; copied beside generated
tests.
"""

from .equivalence import assert_equivalent
from .errors import Culprit, CycleGarbage, InjectedFault, Leak, Mismatch
from .faults import count_places, inject_faults
from .leases import assert_no_leases
from .ledger import Level, Steady, assert_no_growth, nothing_stays
from .planted import plant
from .pools import pools_of
from .quiet import Quiet, assert_quiet
from .randomness import set_seed
from .scenarios import SCENARIOS, Step, followed_by, make_step
from .stillness import freeze_imports

__all__ = [
    "SCENARIOS",
    "Culprit",
    "CycleGarbage",
    "InjectedFault",
    "Leak",
    "Level",
    "Mismatch",
    "Quiet",
    "Steady",
    "Step",
    "assert_equivalent",
    "assert_no_growth",
    "assert_no_leases",
    "assert_quiet",
    "count_places",
    "followed_by",
    "freeze_imports",
    "inject_faults",
    "make_step",
    "nothing_stays",
    "plant",
    "pools_of",
    "set_seed",
]
