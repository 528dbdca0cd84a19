"""Worker processes: all results, whatever dies."""

import faulthandler
import multiprocessing
import os
import signal
import time

import pytest

from auditor import workers
from auditor.workers import Died, WorkFailed, run_all


def square(number: int) -> int:
    return number * number


def square_or_die(number: int) -> int:
    if number in (7, 23):
        faulthandler.disable()  # its report of this would fill the log
        os.kill(os.getpid(), signal.SIGSEGV)
    if number == 50:
        os._exit(3)
    return number * number


def complain(number: int) -> int:
    raise ValueError(f"no {number}")


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_every_item_once(jobs: int) -> None:
    assert sorted(run_all(square, range(100), jobs)) == [(n, n * n) for n in range(100)]


def test_spawned_workers_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_context", multiprocessing.get_context("spawn"))
    assert sorted(run_all(square, range(20), 2)) == [(n, n * n) for n in range(20)]


def test_nothing_to_do() -> None:
    assert list(run_all(square, [], 2)) == []


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_death_costs_one_item(jobs: int) -> None:
    results = dict(run_all(square_or_die, range(100), jobs))
    assert {n: r for n, r in results.items() if isinstance(r, Died)} == {
        7: Died(-signal.SIGSEGV),
        23: Died(-signal.SIGSEGV),
        50: Died(3),
    }
    assert all(results[n] == n * n for n in range(100) if n not in (7, 23, 50))


def test_an_exception_is_ours_and_is_raised() -> None:
    with pytest.raises(WorkFailed, match="ValueError: no "):
        list(run_all(complain, [1, 2, 3], 2))


def test_ending_early_leaves_no_process() -> None:
    results = run_all(square, range(100), 2)
    next(results)
    started = time.monotonic()
    results.close()
    assert time.monotonic() - started < 3
    assert multiprocessing.active_children() == []
