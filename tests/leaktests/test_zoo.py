"""The zoo of planted leaks, each kind once, and a part of the clean zoo. The whole:
tests.leaktests.measure_*.
"""

from __future__ import annotations

import pytest

from tests.leaktests.battery import LARGE, SMALL, first_leak, names_the_line
from tests.leaktests.clean import makers
from tests.leaktests.zoo import kinds

SIZE = {name: (SMALL, LARGE)[number % 2] for number, name in enumerate(kinds())}
CAUGHT_BUT_NOT_NAMED = {
    "c_heap",  # malloc keeps chunks ready, unless GLIBC_TUNABLES forbids it before the process starts
    "nodes_that_save_nothing",  # the quiet pass names the function, not the line
    "storage_that_is_resized",  # made before the step, which no pass looked at
}
CLEAN = list(makers())[::9]


@pytest.mark.slow
@pytest.mark.parametrize("name", kinds())
def test_a_planted_leak_is_caught_and_named(name):
    found = first_leak(kinds()[name](SIZE[name]))
    assert found is not None
    assert names_the_line(found[1]) or name in CAUGHT_BUT_NOT_NAMED, found[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_said_of_clean_code(name):
    for scenario, step in makers()[name]().items():
        assert first_leak(step) is None, scenario
