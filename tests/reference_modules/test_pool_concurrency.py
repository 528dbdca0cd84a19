"""Threads, finalisers that use the pool from inside it, and forks."""

import gc
import os
import random
import signal
import sys
import threading

import pytest
import torch

from reference_modules.pool import PoolError, TensorPool
from reference_modules.pool.store import BlockStore


def in_threads(count, work):
    errors = []

    def run(number):
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.fixture
def switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_never_share_a_block_and_counts_stay_exact(switch_often):
    pool = TensorPool(threshold_mb=0)
    rounds = 150

    def work(number):
        dice = random.Random(number)
        held = []
        for _ in range(rounds):
            tensor = pool.allocate((dice.choice([64, 65, 128]),), torch.int64)
            tensor.fill_(mark := dice.getrandbits(40))
            held.append((tensor, mark))
            if len(held) > 5:
                tensor, mark = held.pop(dice.randrange(5))
                assert tensor.eq(mark).all()
                pool.deallocate(tensor)
        for tensor, mark in held:
            assert tensor.eq(mark).all()
            pool.deallocate(tensor)

    in_threads(6, work)
    stats = pool.stats()
    assert (stats.leases, stats.bytes_in_use, stats.waiting) == (0, 0, 0)
    assert stats.hits + stats.misses == 6 * rounds
    pool.close()


def test_a_lease_may_be_released_and_die_in_other_threads(switch_often):
    pool = TensorPool(threshold_mb=0)
    made = [pool.allocate((100,)).fill_(n) for n in range(200)]

    def work(number):
        for n in range(number, 200, 4):
            assert made[n].eq(n).all()
            pool.deallocate(made[n])
            made[n] = None

    in_threads(4, work)
    assert pool.stats().waiting == 0
    pool.close()


def test_backward_in_another_thread_lets_blocks_go():
    pool = TensorPool(threshold_mb=0)
    weight = torch.ones(100, requires_grad=True)
    lease = pool.allocate((100,)).fill_(2)
    loss = (lease * weight).sum()
    pool.deallocate(lease)
    del lease
    held = [loss]
    del loss
    in_threads(1, lambda _: held.pop().backward())
    assert weight.grad.eq(2).all()
    assert pool.stats().waiting == 0


class ReleasesWhenCollected:
    def __init__(self, pool, held):
        self.pool, self.held, self.me = pool, held, self

    def __del__(self):
        self.pool.deallocate(self.held.pop())
        self.pool.deallocate(self.pool.allocate((7,)))


def test_finalisers_may_use_the_pool_from_inside_the_collector():
    pool = TensorPool(threshold_mb=0)
    held = []
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)  # the collector runs inside the pool's own methods
    try:
        for _ in range(300):
            held.append(pool.allocate((9,)))
            ReleasesWhenCollected(pool, held)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    stats = pool.stats()
    assert (stats.leases, stats.bytes_in_use, stats.waiting) == (0, 0, 0)
    pool.close()


def test_a_release_from_a_finaliser_in_the_leases_own_cycle_comes_too_late(monkeypatch):
    """Python clears weak references to garbage before it runs finalisers: the lease counts as abandoned by
    then.
    """
    refused = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: refused.append(report.exc_value))
    pool = TensorPool(threshold_mb=0)
    ReleasesWhenCollected(pool, [pool.allocate((9,))])
    gc.collect()
    assert [type(error) for error in refused] == [PoolError]
    assert pool.stats().abandoned == 1


def child_status(work):
    child = os.fork()
    if child == 0:
        status = 1
        signal.alarm(30)  # a hanging child must fail its test, not outlive it
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_has_its_own_copy_of_everything():
    pool = TensorPool(threshold_mb=0)
    lease = pool.allocate((5000,)).fill_(1)
    pool.deallocate(pool.allocate((3000,)))

    def child():
        lease.fill_(2)
        pool.deallocate(lease)
        reused = pool.allocate((3000,)).fill_(3)
        assert pool.stats().hits == 1
        pool.deallocate(reused)
        pool.close()

    assert child_status(child) == 0
    assert lease.eq(1).all()  # private memory: the child wrote its own
    assert pool.stats().leases == 1
    pool.deallocate(lease)
    pool.close()


def test_a_fork_waits_for_threads_inside_the_pool():
    pool = TensorPool(threshold_mb=0)
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            pool.deallocate(pool.allocate((64,)))

    threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads:
        thread.start()

    def child():
        for _ in range(20):
            pool.deallocate(pool.allocate((64,)))
        pool.stats()

    try:
        assert [child_status(child) for _ in range(10)] == [0] * 10
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_the_background_thread_stays_with_the_parent():
    pool = TensorPool(threshold_mb=0)
    pool.start_giving_back(every_seconds=100)

    def child():
        assert pool._background is None
        pool.start_giving_back(every_seconds=100)
        pool.close()

    assert child_status(child) == 0
    pool.close()


def test_time_does_not_grow_with_live_leases():
    """Counted in interpreter steps, not seconds: the same calls run whatever is alive."""
    pool = TensorPool(threshold_mb=0, store=BlockStore())

    def calls():
        count = 0

        def trace(frame, event, argument):
            nonlocal count
            count += 1
            return trace

        sys.settrace(trace)
        try:
            pool.deallocate(pool.allocate((16,)))
        finally:
            sys.settrace(None)
        return count

    for _ in range(4):
        calls()
    few = calls()
    held = [pool.allocate((16,)) for _ in range(20_000)]
    calls()
    assert calls() == few
    for tensor in held:
        pool.deallocate(tensor)
