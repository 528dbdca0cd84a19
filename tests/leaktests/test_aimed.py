"""What tests of single findings rest on: leases by line and by class of pool, and the single scenarios."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from auditor.leaktests.aims import best_aimed, code_targets
from auditor.leaktests.plan import Aim, Plan, Target, Variation
from auditor.leaktests.support import Leak, assert_no_growth, assert_no_leases, inject_faults, make_step

HERE = f"leaktests/{Path(__file__).name}"


class Pool:
    def __init__(self):
        self.out = {}

    def allocate(self, shape):
        tensor = torch.empty(shape)
        self.out[id(tensor)] = tensor
        return tensor

    def deallocate(self, tensor):
        del self.out[id(tensor)]


def line_of(text):
    """Where this file says it."""
    lines = Path(__file__).read_text().splitlines()
    return f"{HERE}:{1 + next(number for number, line in enumerate(lines) if line.strip() == text)}"


def two_leaks(pool):
    pool.allocate((1,))  # the first
    return pool.allocate((2,))  # the second


def nothing(turn):
    return (), {}


def a_new_pool(turn):
    return (Pool(),), {}


def test_a_class_stands_for_pools_that_are_made_in_the_step():
    step = make_step(lambda: two_leaks, a_new_pool, "called")
    with pytest.raises(Leak, match="4 leases not given back by 2 steps") as caught:
        assert_no_leases(step, Pool)
    assert {culprit.line.partition(" ")[0].rpartition(":")[2] for culprit in caught.value.culprits} == {
        line_of("pool.allocate((1,))  # the first").rpartition(":")[2],
        line_of("return pool.allocate((2,))  # the second").rpartition(":")[2],
    }


def test_only_leases_through_the_line_count():
    line = line_of("return pool.allocate((2,))  # the second")
    step = make_step(lambda: two_leaks, a_new_pool, "called")
    with pytest.raises(Leak, match="2 leases not given back by 2 steps") as caught:
        assert_no_leases(step, Pool, line=line)
    assert len(caught.value.culprits) == 1
    assert f"{Path(__file__).name}:{line.rpartition(':')[2]} in two_leaks" in str(caught.value)
    assert_no_leases(make_step(lambda: two_leaks, a_new_pool, "called"), Pool, line=f"{HERE}:1")


def test_faults_count_leases_through_the_line_alone():
    def raising(pool):
        scratch = pool.allocate((2,))  # held while it raises
        scratch.zero_()
        pool.deallocate(scratch)

    step = make_step(lambda: raising, a_new_pool, "called")
    line = line_of("scratch = pool.allocate((2,))  # held while it raises")
    with pytest.raises(Leak, match=r"fault 2, in the place of aten\.zero_"):
        inject_faults(step, pools=(Pool,), line=line)
    assert inject_faults(step, pools=(Pool,), line=f"{HERE}:1") == 2


def test_what_a_constructor_takes_shows_when_it_is_built_anew():
    pool = Pool()

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = pool.allocate((4,))

        def forward(self):
            return self.table * 2

    assert_no_leases(make_step(Table, nothing, "no_grad"), pool)
    with pytest.raises(Leak, match="2 leases not given back"):
        assert_no_leases(make_step(Table, nothing, "rebuilt"), pool)


@pytest.mark.parametrize("decorate", [contextmanager, lambda generator: generator])
def test_what_a_block_holds_shows_when_it_is_left_by_a_failure(decorate):
    @decorate
    def staged(pool):
        buffer = pool.allocate((4,))
        yield buffer
        pool.deallocate(buffer)

    pool = Pool()
    assert_no_leases(make_step(lambda: staged, lambda turn: ((pool,), {}), "called"), pool)
    with pytest.raises(Leak, match="2 leases not given back"):
        assert_no_leases(make_step(lambda: staged, lambda turn: ((pool,), {}), "interrupted"), pool)


def test_growth_that_begins_late_has_its_line():
    kept, turn = [], [0]

    def step():
        turn[0] += 1
        if turn[0] > 9:
            kept.append(torch.zeros(1))  # begins late

    with pytest.raises(Leak) as caught:
        assert_no_growth(step)
    line = line_of("kept.append(torch.zeros(1))  # begins late").rpartition(":")[2]
    assert f"{Path(__file__).name}:{line} in " in caught.value.culprits[0].line


def plan(name, kind, *variations):
    target = Target(f"kit/{name}.py", 3, f"kit.{name}", name, kind, "/")
    return Plan(target, (), (), ((2, 32),), ("train",), True, 1, aimed=variations)


def variation(path, fingerprint, shown):
    return Variation(fingerprint, "PA101", f"{path}:3", "", (), (), (2, 32), shown=shown)


def test_a_finding_keeps_the_test_in_which_it_showed():
    there, here = variation("kit/b.py", "f1", True), variation("kit/b.py", "f1", False)
    kept = best_aimed([plan("a", "module", there), plan("b", "module", here), plan("c", "code", here)])
    assert [(p.target.name, len(p.aimed)) for p in kept] == [("a", 1), ("b", 0)]


def test_a_finding_that_shows_nowhere_is_tested_in_its_own_file():
    kept = best_aimed(
        [
            plan("a", "module", variation("kit/b.py", "f1", False)),
            plan("b", "module", variation("kit/b.py", "f1", False)),
        ]
    )
    assert [len(p.aimed) for p in kept] == [0, 1]


def test_what_no_plan_reaches_is_called_for_itself(tmp_path):
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "__init__.py").touch()

    def aim(symbol, path="kit/b.py"):
        return Aim(symbol, "PA101", str(tmp_path / "kit" / "b.py"), 7, (7,), f"{path}:7", "", symbol)

    aims = [aim("take"), aim("Box.take"), aim("Box.take.inner"), aim(""), aim("f", "tests/test_b.py")]
    reached = plan("a", "module", variation("kit/b.py", "take", False))
    found = code_targets([reached], aims)
    assert [(t.key, t.kind, t.line, t.root) for t in found] == [("kit.b:Box.take", "code", 7, str(tmp_path))]
