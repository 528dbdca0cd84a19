"""The native store's rules on a stand-in for torch.cuda; the device itself is tested where there is one."""

from contextlib import contextmanager

import pytest
import torch

from reference_modules.pool import PoolError, TensorPool
from reference_modules.pool.native import NativeStore, expandable_segments

CPU = torch.device("cpu")


class FakeCuda:
    """Counts what it is asked; its memory is the CPU's."""

    def __init__(self):
        self.log = []
        self.cached = 500
        self.allocated = 200

    class MemPool:
        pass

    @contextmanager
    def use_mem_pool(self, pool, device):
        self.log.append("into")
        yield
        self.log.append("out of")

    @contextmanager
    def device(self, device):
        yield

    def empty_cache(self):
        self.cached = self.allocated
        self.log.append("emptied")

    def memory_reserved(self, device):
        return self.cached

    def memory_allocated(self, device):
        return self.allocated

    def mem_get_info(self, device):
        return 10, 1000


@pytest.fixture
def no_settings(monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)


@pytest.fixture
def cuda(no_settings):
    return FakeCuda()


def pool_over(cuda, **settings):
    return TensorPool(threshold_mb=0, name="device", store=NativeStore(CPU, cuda), **settings)


def test_allocations_go_through_a_pool_of_the_allocators(cuda):
    pool = pool_over(cuda)
    tensor = pool.allocate((4,), zero=True)
    assert cuda.log == ["into", "out of"]
    assert not tensor.any()
    stats = pool.stats()
    assert (stats.leases, stats.bytes_in_use, stats.bytes_reserved, stats.bypassed) == (1, 16, 16, 0)
    pool.deallocate(tensor)
    pool.close()


def test_with_expandable_segments_they_stay_in_the_shared_allocator(cuda, monkeypatch):
    monkeypatch.setenv(
        "PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.8, expandable_segments:True"
    )
    assert expandable_segments()
    pool = pool_over(cuda)
    tensor = pool.allocate((4,))
    assert (pool.stats().leases, pool.stats().bytes_in_use, pool.stats().bypassed) == (1, 16, 1)
    pool.deallocate(tensor)
    assert pool.stats().leases == 0
    assert cuda.log == []
    with pool_over(cuda, max_bytes=100).lease((20,)), pytest.raises(PoolError):
        pool_over(cuda, max_bytes=10).allocate((6,))


def test_the_limit_is_on_live_bytes(cuda):
    pool = pool_over(cuda, max_bytes=100)
    with pool.lease((20,)), pytest.raises(PoolError, match=r"'device'.*max_bytes is 100"):
        pool.allocate((6,))
    assert pool.stats().refused == 1


def test_trim_lets_the_allocator_give_its_cache_back(cuda):
    pool = pool_over(cuda)
    assert pool.trim() == 300
    assert pool.trim() == 0
    assert cuda.log == ["emptied"]
    assert pool.stats().evictions == 1


def test_out_of_memory_empties_the_cache_tries_again_and_falls_back(cuda):
    pool = pool_over(cuda)
    refuse = [True]

    @contextmanager
    def full(pool, device):
        if refuse:
            if refuse.pop() == "always":
                refuse.append("always")
            raise torch.OutOfMemoryError("planted")
        yield

    cuda.use_mem_pool = full
    pool.deallocate(pool.allocate((4,)))
    assert cuda.log == ["emptied"]
    assert pool.stats().fallbacks == 0
    refuse.append("always")
    pool.deallocate(pool.allocate((4,)))
    assert pool.stats().fallbacks == 1


def test_pressure_empties_the_cache(cuda):
    pool = pool_over(cuda)
    assert pool.give_back_step(idle_seconds=0, most_bytes=1 << 30) == 300


def test_a_forked_child_is_told_to_spawn(cuda):
    store = NativeStore(CPU, cuda)
    store._made_in = -1
    pool = TensorPool(threshold_mb=0, store=store)
    with pytest.raises(PoolError, match="spawn"):
        pool.allocate((4,))
    assert pool.stats().leases == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device():
    pool = TensorPool("cuda", threshold_mb=0)
    first = pool.allocate((1 << 20,)).fill_(1)
    alias = first.view(-1)
    pool.deallocate(first)
    del first
    with pool.lease((1 << 20,)) as other:
        other.fill_(2)
        assert alias.eq(1).all()
    assert pool.stats().leases == 0
    pool.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_blocks_wait_for_their_copies():
    from reference_modules.pool.pinned import PinnedPool

    pool = PinnedPool("cuda")
    device = torch.empty(1 << 24, dtype=torch.uint8, device="cuda")
    for mark in range(50):
        host = pool.allocate((1 << 24,), torch.uint8).fill_(mark)
        assert host.is_pinned()
        device.copy_(host, non_blocking=True)
        pool.deallocate(host)
        del host
        pool.allocate((1 << 24,), torch.uint8).fill_(255)
        assert device.eq(mark).all()
