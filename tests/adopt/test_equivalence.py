"""Adopted code computes what the code before did: each bit of outputs and gradients, pool off and on."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from auditor.adopt.adoption import Fate
from reference_modules.mixin import set_memory_pool
from reference_modules.pool import TensorPool
from tests.adopt.twins import adopt, identical, importable, module, ran, twin

UNPOOLED = Path(__file__).parents[2] / "examples" / "unpooled"

Call = Callable[[nn.Module], object]
CASES: dict[str, tuple[str, tuple[object, ...], dict[str, object], Call, int]] = {
    "Model": ("model", (32, 2), {}, lambda model: model(_x(2, 65, 32)), 8),
    "Layer": ("model", (32, 4), {}, lambda model: model(_x(1, 33, 32)), 2),
    "BiasedAttention": ("biased", (32,), {"dropout": 0.3}, lambda model: model(_x(2, 40, 32)), 2),
    "ChunkedAttention": ("chunked", (32, 4, 16), {}, lambda model: model(_x(2, 50, 32)), 2),
    "SegmentSummary": ("pooling", (16,), {}, lambda model: model(_x(2, 37, 16), [0.5, 2.0]), 2),
    "Gate": ("pooling", (), {}, lambda model: model(_x(2, 9, 9)), 1),
    "SummaryBlock": ("pooling", (nn.Identity(),), {}, lambda model: model(_x(2, 9, 9)), 1),
}


def _x(*shape: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(shape)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`plain` and `adopted`, the same package before and after."""
    folder = tmp_path_factory.mktemp("twins")
    twin(UNPOOLED, folder, "plain_twin")
    planned, _ = adopt(twin(UNPOOLED, folder, "adopted_twin"), "Model", "Gate")
    assert {each.fate for each in planned.outcomes} == {Fate.ADOPTED}
    assert len(planned.outcomes) == 8
    with importable(folder):
        yield folder


def _pair(name: str) -> tuple[nn.Module, nn.Module]:
    file, given, words, _, _ = CASES[name]
    torch.manual_seed(0)
    plain: nn.Module = getattr(module(f"plain_twin.{file}"), name)(*given, **words)
    pooled: nn.Module = getattr(module(f"adopted_twin.{file}"), name)(*given, **words)
    pooled.load_state_dict(plain.state_dict())
    return plain, pooled


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("packages")
def test_outputs_and_gradients_are_the_same_bits(name: str, train: bool) -> None:
    plain, pooled = _pair(name)
    call = CASES[name][3]
    expected = ran(plain, call, train=train)
    assert identical(expected, ran(pooled, call, train=train)), "with the pool off"
    pool = TensorPool("cpu", name="adopted", threshold_mb=0, debug=True)  # debug poisons what it hands out
    set_memory_pool(pooled, pool)
    for turn in range(3):  # fresh blocks, then blocks that were used before
        assert identical(expected, ran(pooled, call, train=train)), f"with the pool on, turn {turn}"
    pool.close()  # names what is still out


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("packages")
def test_the_pool_is_used_and_gets_everything_back(name: str) -> None:
    _, pooled = _pair(name)
    call, leases = CASES[name][3:]
    pool = TensorPool("cpu", name="adopted", threshold_mb=0)
    set_memory_pool(pooled, pool)
    ran(pooled, call, train=False)
    first = pool.stats()
    assert (first.leases, first.abandoned, first.bytes_in_use) == (0, 0, 0)
    assert first.hits + first.misses == leases
    ran(pooled, call, train=False)
    assert pool.stats().hits > first.hits, "the second turn uses the first one's memory"
    pool.close()


@pytest.mark.usefixtures("packages")
def test_an_exception_in_the_middle_gives_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _, pooled = _pair("BiasedAttention")
    pool = TensorPool("cpu", name="adopted", threshold_mb=0)
    set_memory_pool(pooled, pool)
    monkeypatch.setattr(torch.Tensor, "triu_", _fails)
    with pytest.raises(RuntimeError, match="on purpose"):
        pooled(_x(1, 8, 32))
    monkeypatch.undo()
    assert pool.stats().leases == 0
    pool.close()


def _fails(*_: object) -> None:
    raise RuntimeError("on purpose")


@pytest.mark.usefixtures("packages")
def test_the_switch_reaches_every_pooled_child() -> None:
    model = module("adopted_twin.model").Model(16, 1, 2, True, 0.5)
    switched = [
        (type(each).__name__, each.enable_memory_pool, each.memory_pool_threshold_mb)
        for each in model.modules()
        if hasattr(each, "enable_memory_pool")
    ]
    assert len(switched) == 7
    assert {each[1:] for each in switched} == {(True, 0.5)}
