"""A rank that dies or disagrees ends in an error on all ranks within the timeout, and no lease stays."""

from __future__ import annotations

import os
import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch

from reference_modules.attention import DistributedDilatedAttention, RingDilatedAttention
from reference_modules.attention.workspace import Pool
from reference_modules.pool import TensorPool
from tests.reference_modules.attention.ranks import GROUP_TIMEOUT, all_returned, run

FORMS = {"ring": RingDilatedAttention, "distributed": DistributedDilatedAttention}


def attempt(
    module: Any, inputs: list[torch.Tensor], pool: TensorPool, backward: bool = False
) -> dict[str, Any]:
    """How the call ended, after how long, and with how many leases out."""
    begun = time.monotonic()
    found: dict[str, Any] = {"error": None, "message": ""}
    try:
        out = module(*inputs)
        if backward:
            out.sum().backward()
    except (RuntimeError, ValueError, MemoryError) as error:
        found = {"error": type(error).__name__, "message": str(error)}
    return {**found, "seconds": time.monotonic() - begun, "leases": pool.stats().leases}


def disagree(rank: int, ranks: int, form: str) -> list[dict[str, Any]]:
    pool = TensorPool("cpu", threshold_mb=0)

    def module(**options: Any) -> Any:
        return FORMS[form]([64], [2], enable_memory_pool=True, pool=pool, **options)

    def qkv(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return [torch.randn(shape, dtype=dtype) for _ in range(3)]

    odd = rank == 1
    zigzag = module(placement="zigzag")
    return [
        attempt(module(), qkv(1, 12 if odd else 16, 2, 4), pool),
        attempt(module(), qkv(1, 16, 2, 4, dtype=torch.float64 if odd else torch.float32), pool),
        attempt(module(scale=0.5 if odd else None), qkv(1, 16, 2, 4), pool),
        attempt(module(), [*qkv(1, 16, 2, 4)[:2], torch.zeros(1, 15 if odd else 16, 2, 4)], pool),
        attempt(module(), [torch.zeros(16, 2, 4)] * 3 if odd else qkv(1, 16, 2, 4), pool),
        attempt(zigzag, qkv(1, 15, 2, 4), pool),
        attempt(module(), qkv(1, 16, 2, 4), pool),  # and the group is still in step afterwards
    ]


@pytest.mark.parametrize("form", ["ring", "distributed"])
def test_disagreement_is_an_error_everywhere_at_once(form: str) -> None:
    found = all_returned(run(3, disagree, form))
    for rank, attempts in enumerate(found):
        *refused, last = attempts
        assert [x["error"] for x in refused] == ["ValueError"] * 6, (rank, refused)
        assert last["error"] is None
        assert all(x["leases"] == 0 for x in attempts)
        assert all(x["seconds"] < GROUP_TIMEOUT.total_seconds() for x in attempts)
    assert "holds q of shape (1, 12, 2, 4)" in found[0][0]["message"]
    assert "another dtype or other settings" in found[0][1]["message"]
    assert "another dtype or other settings" in found[2][2]["message"]
    assert "rank 1 refused its input" in found[0][3]["message"]
    assert "v has shape (1, 15, 2, 4)" in found[1][3]["message"]
    assert "zigzag needs an even number" in found[0][5]["message"]


NEVER = 1 << 40


class DyingPool(TensorPool):
    """Ends the process at the k-th lease: somewhere in the middle of the ring."""

    countdown = NEVER

    def allocate(self, *arguments: Any, **options: Any) -> torch.Tensor:
        DyingPool.countdown -= 1
        if DyingPool.countdown == 0:
            os._exit(1)
        return super().allocate(*arguments, **options)


def die(rank: int, ranks: int, form: str, at: str) -> dict[str, Any]:
    pool = DyingPool("cpu", threshold_mb=0)
    module = FORMS[form]([64], [2], enable_memory_pool=True, pool=pool)
    inputs = [torch.randn(1, 16, 2, 4, requires_grad=True) for _ in range(3)]
    out = module(*inputs)
    of_forward = NEVER - DyingPool.countdown
    out.sum().backward()  # everyone is connected
    if rank == 1:
        if at == "before":
            os._exit(1)
        DyingPool.countdown = {"forward": 2, "backward": of_forward + 2}[at]
    return attempt(module, inputs, pool, backward=True)


@pytest.mark.parametrize(
    ("form", "at"),
    [("ring", "before"), ("ring", "forward"), ("ring", "backward"), ("distributed", "backward")],
)
def test_a_dead_rank_is_an_error_on_all_others(form: str, at: str) -> None:
    found = all_returned(run(3, die, form, at, answers=2))
    assert len(found) == 2
    for ended in found:
        assert ended["error"] == "ExchangeError", ended
        assert (
            "a rank died, left or was too slow" in ended["message"] or "could not start" in ended["message"]
        )
        assert ended["leases"] == 0
        assert ended["seconds"] < GROUP_TIMEOUT.total_seconds() + 5


class Refusing:
    """A pool whose k-th lease fails."""

    def __init__(self, pool: Pool, k_th: int) -> None:
        self.pool, self.left, self.name, self.device = pool, k_th, "refusing", torch.device("cpu")

    def allocate(self, *arguments: Any, **options: Any) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            raise MemoryError("no more")
        return self.pool.allocate(*arguments, **options)

    def deallocate(self, tensor: torch.Tensor) -> None:
        self.pool.deallocate(tensor)

    def stats(self) -> Any:
        return self.pool.stats()


def run_out(rank: int, ranks: int) -> dict[str, Any]:
    pool = TensorPool("cpu", threshold_mb=0)
    source: Any = Refusing(pool, 2) if rank == 1 else pool
    module = RingDilatedAttention([64], [2], enable_memory_pool=True, pool=source)
    return attempt(module, [torch.randn(1, 16, 2, 4) for _ in range(3)], pool)


def test_a_rank_without_memory_for_its_buffers_holds_nothing_and_the_others_do_not_hang() -> None:
    found = all_returned(run(2, run_out))
    assert found[1]["error"] == "MemoryError"
    assert found[0]["error"] == "ExchangeError"
    assert [x["leases"] for x in found] == [0, 0]
    assert found[0]["seconds"] < GROUP_TIMEOUT.total_seconds() + 5


def tight(rank: int, ranks: int) -> tuple[float, list[str]]:
    """Every kernel call over more than one head runs out of memory."""
    from reference_modules.attention.kernels import FlashCPU
    from reference_modules.attention.operands import Operands

    torch.manual_seed(rank)
    inputs = [torch.randn(1, 16, 4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    module = RingDilatedAttention([8, 64], [1, 2])
    found = []
    spoken: list[str] = []
    kind = FlashCPU.forward, FlashCPU.backward

    def short(real: Any) -> Any:
        def call(self: Any, x: Operands, *rest: Any) -> Any:
            if x.q_BHLD.shape[0] * x.q_BHLD.shape[1] > 1:
                raise torch.OutOfMemoryError("no room")
            return real(self, x, *rest)

        return call

    for tightly in (False, True):
        if tightly:
            FlashCPU.forward, FlashCPU.backward = (short(x) for x in kind)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = module(*inputs, is_causal=True)
            found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
        spoken = [str(x.message) for x in caught]
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True)), spoken


def test_out_of_memory_goes_on_in_halves_and_says_so() -> None:
    for difference, spoken in all_returned(run(2, tight)):
        assert difference <= 1e-12
        assert any("out of memory on" in message and "going on in halves" in message for message in spoken)


def stay_away(rank: int, ranks: int, in_backward: bool) -> dict[str, Any]:
    pool = TensorPool("cpu", threshold_mb=0)
    module = RingDilatedAttention([64], [2], enable_memory_pool=True, pool=pool, timeout=timedelta(seconds=1))
    inputs = [torch.randn(1, 16, 2, 4, requires_grad=True) for _ in range(3)]
    if rank == 1:
        if in_backward:
            module(*inputs)
        time.sleep(4)
        return {}
    return attempt(module, inputs, pool, backward=True)


@pytest.mark.slow
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_rank_that_never_comes_is_an_error_within_the_modules_timeout(in_backward: bool) -> None:
    found = all_returned(run(3, stay_away, in_backward))
    for ended in (found[0], found[2]):
        assert (ended["error"], ended["leases"]) == ("ExchangeError", 0)
        assert ended["seconds"] < 3.5
