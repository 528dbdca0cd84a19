"""The zoo of planted leaks, each kind once, and a part of the clean zoo. The whole:
tests.leaktests.measure_*.
"""

from __future__ import annotations

import pytest

from tests.leaktests.battery import LARGE, SMALL, first_leak, names_the_line
from tests.leaktests.clean import makers
from tests.leaktests.zoo import kinds

SIZE = {name: (SMALL, LARGE)[number % 2] for number, name in enumerate(kinds())}
NEEDS_A_PLAIN_HEAP = {"c_heap"}
"""Named only where malloc keeps no chunks ready (GLIBC_TUNABLES), which this process cannot ask for any
more.
"""
CLEAN = list(makers())[::9]


@pytest.mark.slow
@pytest.mark.parametrize("name", kinds())
def test_a_planted_leak_is_caught_and_named(name):
    found = first_leak(kinds()[name](SIZE[name]))
    assert found is not None
    assert names_the_line(found[1]) or name in NEEDS_A_PLAIN_HEAP, found[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_said_of_clean_code(name):
    for scenario, step in makers()[name]().items():
        assert first_leak(step) is None, scenario
