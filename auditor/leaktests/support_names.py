"""Which names of the support a generated test uses."""

import re

NAMES = (
    "Leak",
    "assert_equivalent",
    "assert_no_growth",
    "assert_no_leases",
    "assert_quiet",
    "followed_by",
    "freeze_imports",
    "inject_faults",
    "make_step",
    "plant",
    "pools_of",
    "set_seed",
)


def used_names(text: str) -> list[str]:
    """Those that stand in `text`, in the order in which imports are sorted."""
    return [name for name in NAMES if re.search(rf"\b{name}\b", text)]
