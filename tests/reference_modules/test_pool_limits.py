"""Limits and shortage: eviction, refusal, out of memory, pressure, giving back, stepping aside."""

import time

import pytest
import torch

from reference_modules.pool import PoolError, TensorPool, threshold
from reference_modules.pool.blocks import HostMemory
from reference_modules.pool.pressure import LOOK_EVERY, Pressure
from reference_modules.pool.size_classes import SizeClasses, grain_size, grid_size
from reference_modules.pool.store import BlockStore
from reference_modules.pool.usefulness import PATIENCE, TELLING, Usefulness

KB = 1024


def use(pool, nbytes):
    pool.deallocate(pool.allocate(nbytes, torch.uint8))


def test_the_longest_idle_goes_first_under_the_limit():
    pool = TensorPool(max_bytes=100 * KB, threshold_mb=0)
    for kilobytes in (40, 30, 20):
        use(pool, kilobytes * KB)
    use(pool, 40 * KB)  # now the youngest
    use(pool, 35 * KB)
    assert [row["block_bytes"] // KB for row in pool.efficiency() if row["idle"]] == [20, 35, 40]
    assert pool.stats().evictions == 1


def test_the_limit_holds_bypassed_leases_too():
    pool = TensorPool(max_bytes=100 * KB, threshold_mb=60 / KB)
    small = pool.allocate(50 * KB, torch.uint8)
    with pytest.raises(PoolError, match="do not fit"):
        pool.allocate(60 * KB, torch.uint8)
    with pytest.raises(PoolError, match="do not fit"):
        pool.allocate(51 * KB, torch.uint8)
    pool.deallocate(small)
    use(pool, 70 * KB)
    use(pool, 59 * KB)  # plain: the idle block makes room
    stats = pool.stats()
    assert (stats.refused, stats.evictions, stats.bypassed) == (2, 1, 2)
    assert stats.peak_bytes_reserved <= 100 * KB


def test_waiting_blocks_cannot_be_evicted_and_the_error_says_so():
    pool = TensorPool(max_bytes=100 * KB, threshold_mb=0)
    lease = pool.allocate(60 * KB, torch.uint8)
    alias = lease[1:]
    pool.deallocate(lease)
    del lease
    with pytest.raises(PoolError, match="1 blocks wait for their last alias"):
        pool.allocate(60 * KB, torch.uint8)
    del alias
    use(pool, 60 * KB)


def test_under_a_limit_waste_cannot_cause_a_refusal():
    peak = 1 << 20
    pool = TensorPool(max_bytes=int(peak * 1.1), threshold_mb=0)
    for loosen in range(40):
        use(pool, 16 * KB + loosen * 64)
    held = []
    for step in range(64):
        held.append(pool.allocate(16 * KB - step % 7, torch.uint8))
    assert pool.stats().refused == 0
    for tensor in held:
        pool.deallocate(tensor)


class Scarce(HostMemory):
    """Memory that runs out."""

    def __init__(self, total):
        self.left = total

    def make(self, nbytes):
        if nbytes > self.left:
            raise MemoryError(nbytes)
        self.left -= nbytes
        return super().make(nbytes)


def scarce_pool(total):
    store = BlockStore(Scarce(total))
    discard = store._discard

    def count(block):
        store.memory.left += block.size
        discard(block)

    store._discard = count
    return TensorPool(threshold_mb=0, store=store)


def test_out_of_memory_evicts_and_tries_again():
    pool = scarce_pool(100 * KB)
    use(pool, 60 * KB)
    use(pool, 80 * KB)
    stats = pool.stats()
    assert (stats.evictions, stats.fallbacks, stats.misses) == (1, 0, 2)


def test_then_plain_memory_is_used_and_counted():
    pool = scarce_pool(100 * KB)
    with pool.lease(90 * KB, torch.uint8), pool.lease(20 * KB, torch.uint8, zero=True) as plain:
        assert not plain.any()
        stats = pool.stats()
        assert (stats.fallbacks, stats.leases, stats.bytes_in_use) == (1, 2, 110 * KB)
    pool.close()


def test_a_failed_allocation_holds_nothing():
    pool = scarce_pool(10 * KB)
    with pytest.raises(RuntimeError, match="allocate"):
        pool.allocate((1 << 47,), torch.uint8)  # where memory may be overcommitted, less is granted
    assert pool.stats().leases == 0
    assert pool.stats().bytes_reserved == 0
    pool.close()


def machine(tmp_path, total_kb, available_kb, limit="max", used=0):
    files = {
        "proc/meminfo": f"MemTotal: {total_kb} kB\nMemAvailable: {available_kb} kB\n",
        "sys/fs/cgroup/memory.max": f"{limit}\n",
        "sys/fs/cgroup/memory.current": f"{used}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Pressure(tmp_path)


def test_pressure_is_what_would_eat_into_the_last_twentieth(tmp_path):
    assert machine(tmp_path, 1000, 100).missing(0) == 0
    assert machine(tmp_path, 1000, 100).missing(60 * KB) == 10 * KB
    assert machine(tmp_path, 1000, 900, limit=100 * KB, used=90 * KB).missing(10 * KB) == 5 * KB
    assert Pressure(tmp_path / "nowhere").missing(1 << 40) == 0


def test_pressure_is_looked_at_now_and_then(tmp_path):
    pressure = machine(tmp_path, 1000, 0)
    assert pressure.before(1) > 0
    assert pressure.before(1) == 0
    assert pressure.before(LOOK_EVERY) > 0


def test_under_pressure_idle_blocks_go_before_a_new_one_is_made(tmp_path):
    pool = TensorPool(threshold_mb=0, store=BlockStore(pressure=machine(tmp_path, 1000, 70)))
    use(pool, 30 * KB)
    use(pool, 40 * KB)
    assert pool.stats().evictions == 1


def test_a_step_gives_back_what_has_been_idle_long_enough():
    pool = TensorPool(threshold_mb=0)
    use(pool, 10 * KB)
    use(pool, 20 * KB)
    assert pool.give_back_step(idle_seconds=60, most_bytes=1 << 30) == 0
    assert pool.give_back_step(idle_seconds=0, most_bytes=1) == 10 * KB
    assert pool.give_back_step(idle_seconds=0, most_bytes=1 << 30) == 20 * KB


def test_the_background_thread_gives_back_and_ends_with_its_pool():
    pool = TensorPool(threshold_mb=0)
    use(pool, 10 * KB)
    pool.start_giving_back(idle_seconds=0, every_seconds=0.01)
    thread = pool._background._thread
    deadline = time.monotonic() + 20
    while pool.stats().bytes_reserved and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pool.stats().bytes_reserved == 0
    pool.close()
    assert not thread.is_alive()

    other = TensorPool(threshold_mb=0)
    other.start_giving_back(every_seconds=0.01)
    thread = other._background._thread
    del other
    thread.join(20)
    assert not thread.is_alive()


def test_blocks_waste_at_most_a_seventeenth():
    for nbytes in range(64 * 17, 20_000, 7):
        assert nbytes <= grid_size(nbytes) <= nbytes * 17 / 16
        assert grid_size(nbytes) % 64 == 0
        assert grain_size(nbytes) - nbytes < 64
    classes = SizeClasses()
    assert classes.size_for(100_000) == 102_400
    for _ in range(2):
        classes.fit(100_000, 1 << 30)
    assert classes.size_for(100_000) == 100_032  # seen twice: blocks of its own


def test_an_idle_block_serves_what_fits_closely():
    pool = TensorPool(threshold_mb=0)
    use(pool, 160 * KB)
    use(pool, 151 * KB)  # within a sixteenth
    use(pool, 150 * KB)  # not any more
    assert (pool.stats().hits, pool.stats().misses) == (1, 2)


def test_classes_of_sizes_seen_once_do_not_pile_up():
    pool = TensorPool(threshold_mb=0, max_bytes=1 << 20)
    for nbytes in range(100_000, 900_000, 997):
        use(pool, nbytes)
        use(pool, nbytes)
    classes = pool._store.classes
    assert len(classes._seen) <= 256
    assert len(classes._classes) < 120
    assert (
        sum(row["hits"] + row["misses"] for row in pool.efficiency())
        == pool.stats().hits + pool.stats().misses
    )


def test_stepping_aside_where_blocks_never_come_back_and_trying_again():
    useful = Usefulness()
    for _ in range(TELLING):
        assert useful.worth_pooling(1000)
        useful.never_reused(1000)
    answers = [useful.worth_pooling(1000) for _ in range(PATIENCE + 3)]
    assert answers == [False] * (PATIENCE - 1) + [True] * 4
    assert useful.worth_pooling(5000)
    for _ in range(TELLING):
        useful.never_reused(1000)
        useful.reused(1000)
    assert useful.worth_pooling(1000)


def test_a_given_threshold_is_obeyed_whatever_was_seen():
    measured, given = TensorPool(max_bytes=40 << 20), TensorPool(max_bytes=40 << 20, threshold_mb=16)
    for pool in (measured, given):
        for round_ in range(3 * TELLING):
            use(pool, (20 + round_ % 2 * 15) << 20)  # each throws the other out
    assert given.stats().bypassed == 0
    assert measured.stats().bypassed > 0


def test_calibration_is_taken_by_pools_without_a_threshold(monkeypatch):
    from reference_modules.pool import calibration

    monkeypatch.setattr(threshold, "_measured", {})
    monkeypatch.setattr(calibration, "_reuse_wins", lambda nbytes: nbytes >= 4 << 20)
    waiting, given = TensorPool(), TensorPool(threshold_mb=2)
    assert TensorPool().calibrate() == 4
    assert waiting._threshold == 4 << 20
    assert given._threshold == 2 << 20
    assert TensorPool()._threshold == 4 << 20
    monkeypatch.setattr(calibration, "_reuse_wins", lambda nbytes: False)
    assert waiting.calibrate() == calibration.NEVER_MB


def test_calibration_measures(monkeypatch):
    from reference_modules.pool import calibration

    monkeypatch.setattr(calibration, "SIZES_MB", (2, 1))
    monkeypatch.setattr(calibration, "ROUNDS", 2)
    assert calibration.measure() in (1.0, 2.0, calibration.NEVER_MB)
