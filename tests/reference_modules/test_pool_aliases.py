"""Whatever can still read a block holds it; what torch itself re-points behaves as docs/pool.md says."""

import copy
import gc
import io

import numpy as np
import pytest
import torch

from reference_modules.pool import TensorPool, blocks

HOLDERS = {
    "view": lambda t: t.view(-1)[2:],
    "transposed": lambda t: t.t(),
    "detached": lambda t: t.detach(),
    "data": lambda t: t.data,
    "chunk": lambda t: t.chunk(2)[1],
    "unfolded": lambda t: t.unfold(0, 2, 1),
    "reinterpreted": lambda t: t.view(torch.int32),
    "numpy": lambda t: t.numpy(),
    "numpy of a view": lambda t: t[1:].numpy(),
    "numpy dlpack": np.from_dlpack,
    "torch dlpack": torch.from_dlpack,
    "numpy interface": np.asarray,
    "memoryview of numpy": lambda t: memoryview(t.numpy()),
    "untyped storage": lambda t: t.untyped_storage(),
    "typed storage": lambda t: t.storage(),
    "parameter": lambda t: torch.nn.Parameter(t),
    "closure": lambda t: lambda: t,
    "cycle": lambda t: [t],
}


@pytest.fixture(params=[4096, 1 << 20], ids=["mapped", "heap"])
def pool(request, monkeypatch):
    monkeypatch.setattr(blocks, "LARGE", request.param)
    return TensorPool(threshold_mb=0)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("holder", HOLDERS)
def test_an_alias_holds_the_block(pool, holder):
    lease = pool.allocate((64, 64)).fill_(5)
    alias = HOLDERS[holder](lease)
    pool.deallocate(lease)
    del lease
    assert pool.stats().waiting == 1
    others = [pool.allocate((64, 64)).fill_(9) for _ in range(3)]
    assert pool.stats().hits == 0
    if isinstance(alias, torch.Tensor):
        assert (alias.view(torch.float32) if alias.dtype == torch.int32 else alias).eq(5).all()
    elif isinstance(alias, np.ndarray):
        assert (alias == 5).all()
    del alias
    assert pool.stats().waiting == 0
    for tensor in others:
        pool.deallocate(tensor)


def test_autograd_holds_what_it_saved(pool):
    weight = torch.full((64, 64), 2.0, requires_grad=True)
    lease = pool.allocate((64, 64)).fill_(3)
    product = lease * weight
    pool.deallocate(lease)
    del lease
    noise = [pool.allocate((64, 64)).fill_(7) for _ in range(3)]
    assert pool.stats().waiting == 1
    product.sum().backward()
    assert weight.grad.eq(3).all()
    del product
    assert pool.stats().waiting == 0
    for tensor in noise:
        pool.deallocate(tensor)


def test_a_lease_that_requires_grad_keeps_its_gradient_apart(pool):
    with pool.lease((64, 64)) as lease:
        lease.fill_(3).requires_grad_()
        (lease**2).sum().backward()
        assert lease.grad.eq(6).all()
    grad = lease.grad
    del lease
    with pool.lease((64, 64)) as again:
        assert again.grad is None
        again.fill_(1)
        assert grad.eq(6).all()


def test_a_lease_in_a_garbage_cycle_comes_back_with_the_collector(pool):
    gc.disable()
    try:
        knot = [pool.allocate((64, 64))]
        knot.append(knot)
        del knot
        assert pool.stats().abandoned == 0
        gc.collect()
    finally:
        gc.enable()
    assert pool.stats().abandoned == 1
    with pool.lease((64, 64)):
        assert pool.stats().hits == 1


def test_hooks_and_python_attributes_do_not_outlive_their_lease(pool):
    lease = pool.allocate((64, 64)).requires_grad_()
    lease.register_hook(lambda grad: grad * 0)
    pool.deallocate(lease)
    del lease
    with pool.lease((64, 64)) as again:
        again.fill_(1).requires_grad_()
        again.sum().backward()
        assert again.grad.eq(1).all()


@pytest.mark.parametrize(
    "re_point", [lambda t: t.set_(torch.ones(3)), lambda t: setattr(t, "data", torch.ones(3))]
)
def test_re_pointing_gives_the_block_back_and_the_lease_stays(pool, re_point):
    lease = pool.allocate((64, 64))
    re_point(lease)
    assert pool.stats().leases == 1
    assert pool.stats().waiting == 0
    with pool.lease((64, 64)) as again:
        again.fill_(4)
        assert pool.stats().hits == 1
        assert lease.eq(1).all()
    pool.deallocate(lease)
    pool.close()


def test_an_alias_keeps_the_block_of_a_re_pointed_lease(pool):
    lease = pool.allocate((64, 64)).fill_(6)
    view = lease.view(-1)
    lease.set_(torch.ones(3))
    with pool.lease((64, 64)) as other:
        other.fill_(1)
    assert view.eq(6).all()
    pool.deallocate(lease)


def test_share_memory_moves_the_values_away_and_gives_the_block_back(pool):
    lease = pool.allocate((64, 64)).fill_(6)
    lease.share_memory_()
    assert lease.is_shared()
    with pool.lease((64, 64)) as again:
        again.fill_(1)
        assert pool.stats().hits == 1
    assert lease.eq(6).all()
    pool.deallocate(lease)
    pool.close()


def test_a_raw_pointer_holds_nothing(pool):
    lease = pool.allocate((64, 64))
    pointer = lease.data_ptr()
    pool.deallocate(lease)
    del lease
    with pool.lease((64, 64)) as again:
        assert again.data_ptr() == pointer


@pytest.mark.parametrize("grow", [lambda t: t.resize_(10_000), lambda t: t.untyped_storage().resize_(0)])
def test_the_storage_of_a_lease_cannot_be_resized(pool, grow):
    """After a refused resize_ torch leaves the new sizes over the old storage: that tensor may only be
    released.
    """
    lease = pool.allocate((64, 64)).fill_(2)
    view = lease.view(-1)
    with pytest.raises(RuntimeError, match="not resizable"):
        grow(lease)
    assert view.eq(2).all()
    pool.deallocate(lease)
    assert view.eq(2).all()


def test_a_lease_may_be_shrunk_in_place(pool):
    lease = pool.allocate((64, 64)).fill_(2)
    lease.resize_(3)
    pool.deallocate(lease)
    assert lease.tolist() == [2, 2, 2]


def test_copies_and_files_are_plain_memory(pool):
    with pool.lease((64, 64)) as lease:
        lease.fill_(2)
        copied = copy.deepcopy(lease)
        file = io.BytesIO()
        torch.save(lease, file)
    del lease
    with pool.lease((64, 64)) as other:
        other.fill_(9)
        assert pool.stats().hits == 1
    file.seek(0)
    assert copied.eq(2).all()
    assert torch.load(file).eq(2).all()
    assert len(file.getvalue()) < 64 * 64 * 4 + 4096


def test_no_grad_leases_may_be_written_under_grad_mode(pool):
    with torch.no_grad():
        lease = pool.allocate((64, 64)).fill_(1)
    weight = torch.full((64, 64), 2.0, requires_grad=True)
    lease.mul_(weight)
    lease.sum().backward()
    assert weight.grad.eq(1).all()
    pool.deallocate(lease)


def test_aliases_outlive_the_pool():
    pool = TensorPool(threshold_mb=0)
    lease = pool.allocate((1 << 19,)).fill_(3)
    view = lease[5:]
    pool.deallocate(lease)
    pool.close()
    del pool, lease
    gc.collect()
    noise = torch.full((1 << 19,), 4.0)
    assert view.eq(3).all()
    assert noise.eq(4).all()
