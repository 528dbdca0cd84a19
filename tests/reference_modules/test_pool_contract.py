"""What contract.md promises of TensorPool, promise by promise."""

import copy
import pickle
import random

import pytest
import torch

from reference_modules.pool import PoolError, TensorPool, get_global_memory_pool, global_pool
from reference_modules.pool.fragmentation import fragmentation

KB = 1024


@pytest.fixture
def pool():
    return TensorPool(threshold_mb=0, name="p")


def test_a_lease_is_a_fresh_plain_tensor(pool):
    first = pool.allocate((3, 4), torch.float64).fill_(1).requires_grad_()
    first.marked = True
    address = first.data_ptr()
    pool.deallocate(first)
    del first
    second = pool.allocate((3, 4), torch.float64)
    assert second.data_ptr() == address
    assert not second.requires_grad
    assert not hasattr(second, "marked")
    assert second.is_contiguous()
    assert not second._is_view()
    assert second.untyped_storage().nbytes() == 3 * 4 * 8
    assert address % 64 == 0
    pool.deallocate(second)


@pytest.mark.parametrize("shape", [(), 5, (0,), (2, 0, 3), [2, 3], torch.Size((4, 1))])
@pytest.mark.parametrize("threshold_mb", [0, 16])
def test_shapes_as_torch_empty_takes_them(shape, threshold_mb):
    pool = TensorPool(threshold_mb=threshold_mb)
    with pool.lease(shape) as tensor:
        assert tensor.shape == torch.empty(shape).shape


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.int8]
)
def test_every_dtype_is_served_from_a_block(pool, dtype):
    with pool.lease((5, 3), dtype, zero=True) as tensor:
        assert tensor.dtype == dtype
        assert not tensor.view(torch.uint8).any()
    assert pool.stats().misses == 1


@pytest.mark.parametrize("nbytes", [40, 3 << 20])
def test_zero_is_zero_on_new_and_on_used_blocks(pool, nbytes):
    for _ in range(2):
        with pool.lease((nbytes,), torch.uint8, zero=True) as tensor:
            assert not tensor.any()
            tensor.fill_(9)
        del tensor
    assert pool.stats().hits == 1


def test_below_the_threshold_is_plain_memory_and_still_a_lease():
    pool = TensorPool(threshold_mb=1)
    small, large = pool.allocate((10,)), pool.allocate((1 << 18,))
    stats = pool.stats()
    assert (stats.bypassed, stats.misses, stats.leases) == (1, 1, 2)
    assert stats.bytes_in_use == 40 + (1 << 20)
    pool.deallocate(small)
    assert pool.stats().bytes_in_use == 1 << 20
    pool.deallocate(large)
    pool.close()


def test_the_threshold_is_16_mb_where_nothing_was_measured():
    pool = TensorPool()
    with pool.lease((16 << 20) - 1, torch.uint8), pool.lease(16 << 20, torch.uint8):
        assert (pool.stats().bypassed, pool.stats().misses) == (1, 1)


def test_a_block_waits_for_its_last_alias(pool):
    lease = pool.allocate((100,)).fill_(3)
    view = lease[50:]
    pool.deallocate(lease)
    assert lease.sum() == 300
    assert pool.stats().waiting == 1
    other = pool.allocate((100,)).fill_(8)
    del lease
    assert pool.stats().waiting == 1
    assert view.sum() == 150
    del view
    assert pool.stats().waiting == 0
    pool.deallocate(other)
    assert pool.stats().hits == 0
    pool.deallocate(pool.allocate((100,)))
    assert pool.stats().hits == 1


def test_an_abandoned_lease_gives_its_memory_back_and_stays_counted(pool):
    lease = pool.allocate((100,))
    alias = lease.detach()
    del lease
    stats = pool.stats()
    assert (stats.leases, stats.abandoned, stats.bytes_in_use, stats.waiting) == (1, 1, 0, 1)
    del alias
    assert pool.stats().waiting == 0
    with pool.lease((100,)):
        assert pool.stats().hits == 1
    assert pool.stats().leases == 1
    with pytest.raises(PoolError, match=r"'p' closed with 0 outstanding leases .* and 1 abandoned"):
        pool.close()


def test_a_bypassed_lease_can_be_abandoned_too():
    pool = TensorPool()
    pool.allocate((100,))
    stats = pool.stats()
    assert (stats.leases, stats.abandoned, stats.bytes_in_use, stats.bytes_reserved) == (1, 1, 0, 0)


def test_lease_gives_back_when_the_block_raises(pool):
    with pytest.raises(ZeroDivisionError), pool.lease((4,)):
        _ = 1 / 0
    assert pool.stats().leases == 0


def test_inference_mode_makes_ordinary_tensors(pool):
    with torch.inference_mode():
        leases = [pool.allocate((4,), zero=True), TensorPool().allocate((4,), zero=True)]
    for tensor in leases:
        assert not tensor.is_inference()
        (tensor * torch.ones(4, requires_grad=True)).sum().backward()


def test_peaks_and_fragmentation(pool):
    kept = [pool.allocate(1 << 20, torch.uint8) for _ in range(3)]
    for tensor in kept:
        pool.deallocate(tensor)
    stats = pool.stats()
    assert stats.peak_bytes_in_use == stats.peak_bytes_reserved == stats.bytes_reserved == 3 << 20
    assert pool.fragmentation() == {"internal": 0, "reserve_overhead": 0, "external": None, "refusals": 0}


@pytest.mark.parametrize("threshold_mb", [0, 16], ids=["pooled", "bypassed"])
def test_no_peak_is_missed_however_leases_end(threshold_mb):
    """Nobody looks at the figures between the steps, and a peak is over when the next step begins."""
    draw = random.Random(7)
    pool = TensorPool(threshold_mb=threshold_mb)
    live: list[torch.Tensor] = []
    in_use = peak = 0
    for _ in range(400):
        fate = draw.random()
        if not live or fate < 0.45:
            size = draw.randrange(1, 9) * KB
            live.append(pool.allocate(size, torch.uint8))
            in_use += size
            peak = max(peak, in_use)
            continue
        tensor = live.pop(draw.randrange(len(live)))
        in_use -= tensor.numel()
        if fate < 0.8:
            pool.deallocate(tensor)
        elif fate < 0.9:
            pool.trim()
        del tensor  # unreleased, where it was not released above
    stats = pool.stats()
    assert (stats.bytes_in_use, stats.peak_bytes_in_use) == (in_use, peak)
    assert stats.peak_bytes_reserved >= peak
    if threshold_mb:
        assert stats.peak_bytes_reserved == peak


def test_the_four_numbers_are_what_they_say():
    numbers = fragmentation(requested=75, served=100, peak_in_use=60, peak_reserved=80, refusals=2)
    assert numbers == {"internal": 0.25, "reserve_overhead": 0.25, "external": None, "refusals": 2}
    assert fragmentation(requested=0, served=0, peak_in_use=0, peak_reserved=0, refusals=0)["internal"] == 0


def test_efficiency_names_every_class_that_served(pool):
    for nbytes in (1000, 1000, 5 * KB):
        pool.deallocate(pool.allocate(nbytes, torch.uint8))
    rows = pool.efficiency()
    assert [(row["block_bytes"], row["hits"], row["misses"]) for row in rows] == [
        (1024, 1, 1),
        (5 * KB, 0, 1),
    ]
    assert rows[0]["waste"] == pytest.approx(24 / 1024)


def test_trim_gives_idle_blocks_back_oldest_first(pool):
    for nbytes in (10, 20, 30):
        pool.deallocate(pool.allocate(nbytes * KB, torch.uint8))
    assert pool.trim(keep_bytes=50 * KB) == 10 * KB
    assert pool.trim() == 50 * KB
    assert pool.stats().bytes_reserved == 0
    assert pool.stats().evictions == 3


def test_close_is_the_end_but_releases_still_count(pool):
    tensor = pool.allocate((4,)).fill_(2)
    with pytest.raises(PoolError, match="1 outstanding"):
        pool.close()
    pool.close()
    pool.deallocate(tensor)
    assert tensor.sum() == 8
    assert pool.stats().leases == 0
    with pytest.raises(PoolError, match=r"'p' is closed .*make a new TensorPool"):
        pool.allocate((4,))


def test_the_with_statement_closes_and_does_not_hide_the_first_error():
    with TensorPool(threshold_mb=0) as pool:
        pool.deallocate(pool.allocate((4,)))
    assert pool.closed
    with pytest.raises(KeyError) as caught, TensorPool(threshold_mb=0) as pool:
        kept = pool.allocate((4,))
        raise KeyError
    assert "1 outstanding" in caught.value.__notes__[0]
    pool.deallocate(kept)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda pool: pickle.loads(pickle.dumps(pool))])
def test_copies_are_empty_pools_with_the_same_settings(again):
    pool = TensorPool(name="p", max_bytes=1 << 20, threshold_mb=0, tracking=True, debug=True)
    with pool.lease((4,)):
        other = again(pool)
    assert other._settings == pool._settings
    assert other.stats().leases == 0


def test_the_global_pool_is_one_a_device(monkeypatch):
    monkeypatch.setattr(global_pool, "_pools", {})  # other tests have borrowed from this process's own
    pool = get_global_memory_pool("cpu")
    assert pool is get_global_memory_pool()
    assert pool is get_global_memory_pool(torch.device("cpu"))
    pool.close()
    assert get_global_memory_pool() is not pool


def test_debug_poisons_what_is_handed_out_uncleared():
    pool = TensorPool(threshold_mb=0, debug=True)
    with (
        pool.lease((3,)) as new,
        pool.lease((3,), torch.int64) as whole,
        pool.lease((3,), torch.bool) as truth,
    ):
        assert new.isnan().all()
        assert (whole == -1).all()
        assert truth.all()
    with pool.lease((3,), zero=True) as cleared, pool.lease((), torch.bfloat16) as single:
        assert not cleared.any()
        assert single.isnan()


def test_the_fault_hook_runs_before_anything_is_held():
    seen = []

    def hook(nbytes):
        seen.append(nbytes)
        if len(seen) == 2:
            raise MemoryError("planted")

    for threshold_mb in (0, 16):
        seen.clear()
        pool = TensorPool(threshold_mb=threshold_mb, fault_hook=hook)
        with pool.lease((4,)):
            with pytest.raises(MemoryError, match="planted"):
                pool.allocate((5,))
            assert pool.stats().leases == 1
        assert seen == [16, 20]
        pool.fault_hook = None
        with pool.lease((6,)):
            assert seen == [16, 20]
        pool.fault_hook = hook
        with pool.lease((7,)):
            assert seen == [16, 20, 28]
        pool.close()


def test_fake_tensors_get_no_block(pool):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode(), pool.lease((4,)) as tensor:
        assert isinstance(tensor, FakeTensor)
    assert pool.stats().bypassed == 1


def test_functional_transforms_get_memory_of_their_own(pool):
    def work(x):
        with pool.lease((3,), zero=True) as scratch:
            return (scratch.add_(x) * x).sum()

    assert torch.func.grad(work)(torch.ones(3)).tolist() == [2, 2, 2]
    assert pool.stats().bypassed == 1
    assert pool.stats().leases == 0


def test_the_default_device_does_not_decide(pool):
    with torch.device("meta"), pool.lease((3,)) as pooled, TensorPool().lease((3,)) as plain:
        assert (pooled.device.type, plain.device.type) == ("cpu", "cpu")


def test_a_dispatch_mode_sees_no_foreign_operation(pool):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Seen(), pool.lease((3, 4)):
        pass
    assert set(seen) <= {"aten.resize_.default"}
    assert pool.stats().misses == 1
