"""Other circumstances for a finding: what they feed and call afterwards, and that mended code passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from auditor.leaktests.plan import Aim, Argument
from auditor.leaktests.probe.circumstances import other_feeds, sequels
from auditor.leaktests.probe.running import Scope
from auditor.leaktests.support import Leak, assert_no_leases, followed_by, make_step
from tests.leaktests.test_faults import Blocks

IMPORTS = (f"from {__name__} import Request",)


class Request:
    def __init__(self, number: int, blocks: list[int] | None = None, names: list[str] | None = None):
        self.number, self.blocks, self.names = number, blocks, names


class Cache:
    """Keeps blocks under a key; `clear` forgets them, `reset` gives them back."""

    def __init__(self, pool):
        self.pool, self.entries = pool, {}

    def reserve(self, key):
        if key not in self.entries:
            self.entries[key] = self.pool.alloc_blocks(1)

    def clear(self):
        self.entries.clear()

    def reset(self):
        for blocks in self.entries.values():
            self.pool.free_blocks(blocks)
        self.entries.clear()

    def drop(self, key):
        del self.entries[key]

    close = reset


def test_numbers_become_small_and_lists_hold_something():
    feed = (Argument("request", "Request(number=64)"), Argument("count", "64"), Argument("name", "'a'", True))
    small, full = other_feeds(feed, Scope("cpu"), IMPORTS)
    assert [argument.text for argument in small] == ["request=Request(number=64)", "count=1", "'a'"]
    assert [a.text for a in full] == ["request=Request(number=64, blocks=[0, 1])", "count=64", "'a'"]


def test_arguments_that_are_small_and_full_have_no_others():
    feed = (Argument("request", "Request(number=1, blocks=[3])"), Argument("count", "1"))
    assert list(other_feeds(feed, Scope("cpu"), IMPORTS)) == []


def line_of(text):
    lines = Path(__file__).read_text().splitlines()
    return 1 + next(number for number, line in enumerate(lines) if line.strip() == text)


def aim(*lines):
    return Aim("f", "PA110", __file__, lines[0], lines, f"{Path(__file__).name}:{lines[0]}", "")


def test_methods_on_the_path_are_called_afterwards():
    acquire = line_of("self.entries[key] = self.pool.alloc_blocks(1)")
    clears = line_of("self.entries.clear()")
    assert sequels(Cache, "reserve", [aim(acquire, clears)]) == ["clear"]
    assert sequels(Cache, "reserve", [aim(acquire)]) == []
    assert sequels(Cache, "reserve", [aim(acquire, line_of("del self.entries[key]"))]) == []  # wants a key
    assert sequels(len, "", [aim(acquire, clears)]) == []


@pytest.mark.parametrize(("sequel", "leaks"), [("clear", True), ("reset", False)])
def test_what_another_method_drops_shows_when_it_is_called(sequel, leaks):
    pool = Blocks()
    step = make_step(
        lambda: followed_by(Cache(pool).reserve, sequel), lambda turn: ((), {"key": 1}), "called"
    )
    if leaks:
        with pytest.raises(Leak, match="2 leases not given back by 2 steps"):
            assert_no_leases(step, pool)
    else:
        assert_no_leases(step, pool)
