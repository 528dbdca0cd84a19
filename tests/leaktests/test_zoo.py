"""The zoo of planted leaks, each kind once, and a part of the clean zoo. The whole:
tests.leaktests.measure_*.
"""

from __future__ import annotations

import pytest

from tests.leaktests.battery import LARGE, SMALL, first_leak, names_the_line
from tests.leaktests.clean import makers
from tests.leaktests.measure_zoo import as_the_gate_runs_it
from tests.leaktests.zoo import kinds

SIZE = {name: (SMALL, LARGE)[number % 2] for number, name in enumerate(kinds())}
IN_THE_GATE = {"c_heap"}
"""malloc keeps chunks ready, unless GLIBC_TUNABLES forbids it before the process starts, as the gate does."""
CLEAN = list(makers())[::9]


@pytest.mark.slow
@pytest.mark.parametrize("name", kinds())
def test_a_planted_leak_is_caught_and_named(name):
    if name in IN_THE_GATE:
        told = as_the_gate_runs_it(name, SIZE[name])
        assert told["pass"] == "quiet" and told["named"], told["message"]
        return
    found = first_leak(kinds()[name](SIZE[name]))
    assert found is not None
    assert names_the_line(found[1]), found[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_said_of_clean_code(name):
    for scenario, step in makers()[name]().items():
        assert first_leak(step) is None, scenario
