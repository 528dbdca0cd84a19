"""The mixin: off by default and then plain torch; on, exact and clean; alone, still whole."""

import copy
import importlib.util
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from reference_modules import mixin as mixin_file
from reference_modules.mixin import MemoryPoolMixin
from reference_modules.pool import PoolError, TensorPool, get_global_memory_pool, set_memory_pool


class Squares(MemoryPoolMixin, nn.Module):
    """Uses a pooled temporary that does not leave it."""

    def __init__(self, enable_memory_pool=False, memory_pool_threshold_mb=None, **pool):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self._init_memory_pool(enable_memory_pool, memory_pool_threshold_mb, **pool)

    def forward(self, x):
        with self._lease_tensor(x.shape, x.dtype, x.device) as scratch:
            with torch.no_grad():
                torch.mul(x, x, out=scratch)
            return self.linear(scratch.clone())


class Tree(MemoryPoolMixin, nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(Squares(), nn.ReLU(), Squares())
        self._init_memory_pool()


class Uninitialised(MemoryPoolMixin, nn.Module):
    pass


def test_off_is_plain_torch():
    module = Squares()
    assert module.enable_memory_pool is False
    tensor = module._allocate_tensor((2, 3), torch.float64, "cpu")
    assert tensor.eq(0).all()
    assert tensor.dtype is torch.float64
    module._deallocate_tensor(tensor)
    module._deallocate_tensor(tensor)
    assert module.get_memory_info()["leases"] == 0
    assert module.get_memory_info()["pools"] == {}


class Traced(MemoryPoolMixin, nn.Module):
    def forward(self, x):
        with self._lease_tensor(x.shape, x.dtype, x.device) as first:
            first.add_(x)
            second = self._allocate_tensor(x.shape, x.dtype, x.device)
            try:
                return second.add_(first) * 2
            finally:
                self._deallocate_tensor(second)


@pytest.mark.parametrize("on", [False, True])
def test_compiled_off_is_one_graph_and_on_gives_the_same(on):
    module = Traced()
    module._init_memory_pool(on)
    compiled = torch.compile(module, backend="eager", fullgraph=not on)
    assert compiled(torch.ones(3)).tolist() == [2, 2, 2]


def test_off_and_on_give_the_same_bits():
    pool = TensorPool(threshold_mb=0, debug=True)
    module = Squares()
    x = torch.randn(4, 8)
    results = []
    for given in (None, pool, pool):
        set_memory_pool(module, given)
        module.zero_grad()
        out = module(x)
        out.sum().backward()
        results.append((out.detach().clone(), module.linear.weight.grad.clone()))
    for out, grad in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(grad, results[0][1])
    assert pool.stats().hits == 1
    pool.close()


def test_the_modules_threshold_wins_over_the_pools():
    pool = TensorPool(threshold_mb=16)
    module = Squares(True, 0, pool=pool)
    module._deallocate_tensor(module._allocate_tensor((4,), torch.float32, "cpu"))
    assert (pool.stats().misses, pool.stats().bypassed) == (1, 0)
    low = TensorPool(threshold_mb=0)
    module = Squares(True, 1, pool=low)
    module._deallocate_tensor(module._allocate_tensor((4,), torch.float32, "cpu"))
    assert (low.stats().misses, low.stats().bypassed) == (0, 1)


def test_a_negative_threshold_is_refused():
    with pytest.raises(ValueError, match="memory_pool_threshold_mb=-1 must be 0 or more"):
        Squares(True, -1)


def test_on_without_a_pool_uses_the_global_one():
    before = get_global_memory_pool("cpu").stats().bypassed
    Squares(True)(torch.zeros(1, 8))
    assert get_global_memory_pool("cpu").stats().bypassed == before + 1


def test_a_pool_of_its_own_names_places_and_closes_with_cleanup():
    module = Squares(True, 0, lightweight_pool=False)
    tensor = module._allocate_tensor((4,), torch.float32, "cpu")
    (pool,) = module._own_pools.values()
    ((place, count),) = pool.outstanding().items()
    assert place.startswith(f"{__file__}:")
    assert count == 1
    module._deallocate_tensor(tensor)
    with pytest.raises(PoolError, match="released twice"):
        module._deallocate_tensor(tensor)
    module.cleanup_memory_pool()
    assert pool.closed


def test_cleanup_gives_back_what_is_still_held():
    pool = TensorPool(threshold_mb=0)
    module = Squares(True, pool=pool)
    kept = module._allocate_tensor((4,), torch.float32, "cpu")
    assert module.get_memory_info()["leases"] == 1
    assert module.get_memory_info()["bytes_in_use"] == 16
    module.cleanup_memory_pool()
    module.cleanup_memory_pool()
    assert pool.stats().leases == 0
    assert kept.eq(0).all()
    pool.close()


def test_one_failing_release_does_not_keep_the_rest_from_going_back():
    pool = TensorPool(threshold_mb=0)
    module = Squares(True, pool=pool)
    kept = [module._allocate_tensor((4,), torch.float32, "cpu") for _ in range(3)]
    pool.deallocate(kept[1])  # behind the module's back
    with pytest.raises(PoolError, match="released twice"):
        module.cleanup_memory_pool()
    assert pool.stats().leases == 0


def test_a_pool_of_its_own_and_a_device_without_one():
    module = Squares(True, lightweight_pool=False)
    tensor = module._allocate_tensor((4,), torch.float32, "meta")
    assert (tensor.device.type, tensor.shape) == ("meta", (4,))
    module._deallocate_tensor(tensor)
    module.cleanup_memory_pool()


def test_the_scope_cleans_up_when_its_block_raises():
    pool = TensorPool(threshold_mb=0)
    module = Squares(True, pool=pool)
    with pytest.raises(KeyError), module.memory_pool_scope():
        kept = module._allocate_tensor((4,), torch.float32, "cpu")
        raise KeyError
    assert pool.stats().leases == 0
    del kept
    pool.close()


def test_a_dying_module_gives_back_too():
    pool = TensorPool(threshold_mb=0)
    module = Squares(True, pool=pool)
    kept = module._allocate_tensor((4,), torch.float32, "cpu")
    del module
    assert pool.stats().leases == 0
    del kept


def test_an_abandoned_temporary_stays_the_pools_to_report():
    pool = TensorPool(threshold_mb=0)
    module = Squares(True, pool=pool)
    module._allocate_tensor((4,), torch.float32, "cpu")
    assert module.get_memory_info()["leases"] == 0
    assert pool.stats().abandoned == 1


@pytest.mark.parametrize("again", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_leave_pool_and_leases_behind(again):
    pool = TensorPool(threshold_mb=0)
    module = Squares(True, 3, pool=pool)
    kept = module._allocate_tensor((4,), torch.float32, "cpu")
    other = again(module)
    assert (other.enable_memory_pool, other.memory_pool_threshold_mb, other._memory_pool) == (True, 3, None)
    assert other.get_memory_info()["leases"] == 0
    assert torch.equal(other.linear.weight, module.linear.weight)
    other(torch.zeros(1, 8))
    module._deallocate_tensor(kept)
    pool.close()


def test_the_switch_is_handed_to_the_whole_tree():
    tree, pool = Tree(), TensorPool(threshold_mb=0)
    assert set_memory_pool(tree, pool, memory_pool_threshold_mb=2) == 3
    assert all(m._memory_pool is pool and m.enable_memory_pool for m in (tree, tree.inner[0], tree.inner[2]))
    assert tree.inner[2].memory_pool_threshold_mb == 2
    held = tree.inner[0]._allocate_tensor((4,), torch.float32, "cpu")
    assert set_memory_pool(tree, None) == 3
    assert not tree.inner[0].enable_memory_pool
    tree.inner[0]._deallocate_tensor(held)
    assert pool.stats().leases == 0
    assert set_memory_pool(nn.Linear(1, 1), pool) == 0


def test_other_devices_step_aside():
    module = Squares(True, pool=TensorPool(threshold_mb=0))
    tensor = module._allocate_tensor((4,), torch.float32, "meta")
    module._deallocate_tensor(tensor)
    with pytest.raises(ValueError, match="released twice, or never allocated"):
        module._deallocate_tensor(tensor)


def test_without_init_everything_is_off():
    module = Uninitialised()
    module._deallocate_tensor(module._allocate_tensor((4,), torch.float32, None))
    module.cleanup_memory_pool()
    assert module.get_memory_info()["enabled"] is False
    assert set_memory_pool(module, TensorPool()) == 1


@pytest.fixture
def alone(monkeypatch):
    """The file as an adopting repository has it: by itself."""
    monkeypatch.setitem(sys.modules, "reference_modules.pool", None)
    path = Path(mixin_file.__file__)
    spec = importlib.util.spec_from_file_location("vendored_mixin", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "vendored_mixin", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("lightweight", [True, False])
def test_the_file_works_alone(alone, lightweight):
    class Vendored(alone.MemoryPoolMixin, nn.Module):
        pass

    module = Vendored()
    module._init_memory_pool(True, 0, lightweight)
    for _ in range(3):
        with torch.inference_mode(), module._lease_tensor((1000, 3), torch.float32, "cpu") as tensor:
            assert tensor.eq(0).all()
            assert not tensor.is_inference()
            tensor.fill_(1)
            alias = tensor.view(-1)[5:]
        del tensor
        assert alias.eq(1).all()
        del alias
    pool = alone._vendored if lightweight else next(iter(module._own_pools.values()))
    assert pool.stats() == {
        "leases": 0,
        "idle_bytes": 12_000,
        "abandoned": 0,
        "hits": 2,
        "misses": 1,
        "bypassed": 0,
    }
    kept = module._allocate_tensor((1000, 3), torch.float32, "cpu")
    module._deallocate_tensor(kept)
    with pytest.raises(RuntimeError, match="released twice"):
        module._deallocate_tensor(kept)
    copied = copy.deepcopy(module)
    assert copied.get_memory_info()["leases"] == 0
    module.cleanup_memory_pool()


def test_alone_a_waiting_block_is_not_handed_out(alone):
    pool = alone.SmallPool()
    lease = pool.allocate_above(0, (1000,), torch.float32).fill_(1)
    alias = lease.detach()
    pool.deallocate(lease)
    del lease
    other = pool.allocate_above(0, (1000,), torch.float32).fill_(2)
    assert alias.eq(1).all()
    del alias
    third = pool.allocate_above(0, (1000,), torch.float32)
    assert pool.stats()["hits"] == 1
    pool.allocate_above(0, (1000,), torch.float32)
    for tensor in (other, third):
        pool.deallocate(tensor)
    pool.close()
    assert other.eq(2).all()


def test_the_file_needs_only_torch():
    import ast

    tree = ast.parse(Path(mixin_file.__file__).read_text())
    names = {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {node.module.split(".")[0] for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert names - set(sys.stdlib_module_names) == {"torch"}
