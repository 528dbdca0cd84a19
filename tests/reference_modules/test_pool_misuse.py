"""Bad use: every error names the pool, the places in tracking mode, and the way out."""

import re
from pathlib import Path

import pytest
import torch

from reference_modules.pool import PoolError, TensorPool

HERE = Path(__file__).name


@pytest.fixture(params=[0, 16], ids=["pooled", "bypassed"])
def pool(request):
    return TensorPool(threshold_mb=request.param, name="mine", tracking=True)


def places(error):
    return re.findall(rf"{HERE}:\d+", str(error.value))


def test_releasing_twice_names_three_places(pool):
    tensor = pool.allocate((4,))
    pool.deallocate(tensor)
    with pytest.raises(PoolError, match=r"'mine': tensor released twice: .*drop the second release") as error:
        pool.deallocate(tensor)
    assert len(set(places(error))) == 3


def test_releasing_another_pools_tensor_names_that_pool(pool):
    other = TensorPool(threshold_mb=0, name="theirs", tracking=True)
    tensor = other.allocate((4,))
    with pytest.raises(PoolError, match=r"'mine'.*belongs to pool 'theirs'.*release it to the pool") as error:
        pool.deallocate(tensor)
    assert len(set(places(error))) == 2
    other.deallocate(tensor)


@pytest.mark.parametrize(
    "foreign",
    [
        lambda t: torch.empty(4),
        lambda t: t[:],
        lambda t: t.detach(),
        lambda t: t.to_sparse(),
        lambda t: None,
        lambda t: "x",
    ],
)
def test_releasing_a_stranger_or_an_alias(pool, foreign):
    tensor = pool.allocate((4,), zero=True)
    with pytest.raises(
        PoolError, match=r"'mine'.*no lease of this pool.*the very object that allocate returned"
    ) as error:
        pool.deallocate(foreign(tensor))
    assert len(places(error)) == 1
    assert pool.stats().leases == 1
    pool.deallocate(tensor)


def test_a_new_tensor_at_an_old_address_is_not_taken_for_a_lease(pool):
    for _ in range(200):
        pool.allocate((4,))  # abandoned: its id will be used again
        with pytest.raises(PoolError, match="no lease of this pool"):
            pool.deallocate(torch.empty(4))
    assert pool.stats().abandoned == 200


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        ((-1, 4), "negative"),
        ((-2, -2), "negative"),
        ((2.5,), "not a sequence"),
        ("ab", "not a sequence"),
        (None, "not a sequence"),
    ],
)
def test_absurd_shapes(pool, shape, complaint):
    with pytest.raises(PoolError, match=f"'mine'.*{complaint}") as error:
        pool.allocate(shape)
    assert isinstance(error.value, ValueError)
    assert pool.stats().leases == 0


def test_absurd_shapes_without_tracking_too():
    pool = TensorPool(name="mine")
    for shape in [(-1, 4), (-2, -2), (2.5,), "ab", None]:
        with pytest.raises(PoolError, match="'mine'"):
            pool.allocate(shape)
    assert pool.stats().leases == 0


def test_a_request_beyond_the_address_space(pool):
    with pytest.raises(PoolError, match="look at the shape"):
        pool.allocate((1 << 40, 1 << 40))


@pytest.mark.parametrize("dtype", ["float32", None, 4, float])
def test_unknown_dtypes(pool, dtype):
    with pytest.raises(PoolError, match=r"no torch.dtype"):
        pool.allocate((4,), dtype)


@pytest.mark.parametrize("device", ["meta", "sparse", "cuda:7", object()])
def test_a_pool_serves_its_own_device_only(pool, device):
    with pytest.raises(PoolError, match="'mine' lives on cpu"):
        pool.allocate((4,), device=device)


@pytest.mark.parametrize("device", ["meta", "sparse", "xla", "", object()])
def test_no_pool_lives_there(device):
    with pytest.raises(PoolError, match="use 'cpu' or"):
        TensorPool(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_no_cuda_here():
    with pytest.raises(PoolError, match="no CUDA device"):
        TensorPool("cuda")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"max_bytes": 0}, "max_bytes=0"),
        ({"max_bytes": -5}, "max_bytes=-5"),
        ({"threshold_mb": -1}, "threshold_mb=-1"),
        ({"threshold_mb": float("nan")}, "threshold_mb=nan"),
        ({"backend": "magic"}, "choose one of"),
        ({"backend": "native"}, "use 'lease'"),
    ],
)
def test_settings_that_cannot_be(arguments, complaint):
    with pytest.raises(PoolError, match=complaint):
        TensorPool("cpu", name="mine", **arguments)


@pytest.mark.parametrize("threshold_mb", [0, 16])
def test_a_limit_too_small(threshold_mb):
    pool = TensorPool(max_bytes=1000, threshold_mb=threshold_mb, name="mine")
    with pytest.raises(PoolError, match=r"'mine'.*max_bytes is 1000.*raise max_bytes"):
        pool.allocate((1000,))
    assert pool.stats().refused == 1
    assert pool.stats().leases == 0
    pool.deallocate(pool.allocate((100,)))


def test_tracking_names_the_place_of_every_outstanding_lease():
    pool = TensorPool(threshold_mb=0, tracking=True)
    kept = [pool.allocate((4,)) for _ in range(3)]
    pool.allocate((4,))
    with pool.lease((4,)):
        assert sorted(pool.outstanding().values()) == [1, 1, 3]
    with pytest.raises(PoolError, match="outstanding: 3 from") as error:
        pool.close()
    assert f"abandoned: 1 from {__file__}:" in str(error.value)
    del kept


def test_without_tracking_the_error_says_how_to_learn_more():
    pool = TensorPool(threshold_mb=0)
    kept = pool.allocate((4,))
    with pytest.raises(PoolError, match="tracking=True names it"):
        pool.close()
    pool.deallocate(kept)
