"""A step that runs out of memory on one device goes on in smaller parts, says so, and changes no number."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from reference_modules.attention import BlockSparseRingDilatedAttention, DilatedAttention, dilated_attention
from reference_modules.attention.kernels import FlashCPU
from reference_modules.attention.operands import Operands
from reference_modules.attention.patterns import BlockPattern
from reference_modules.attention.plain import Plain
from tests.reference_modules.attention import oracle
from tests.reference_modules.attention.drawn import numbers

pytestmark = pytest.mark.filterwarnings("ignore:out of memory on")  # the tests that want it look for it
BRANCHES = {"segment_lengths": [8, 16, 12], "dilation_rates": [1, 2, 5], "is_causal": True}
BOTH = {"detach_mixing": True, "dropout_p": 0.2}
TORCHS_OWN = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")

FORWARD = Plain.forward


def room_for(most: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel call over more than so many heads of segments runs out of memory."""

    def short(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, x: Operands, *rest: Any) -> Any:
            if x.q_BHLD.shape[0] * x.q_BHLD.shape[1] > most:
                raise error
            return real(self, x, *rest)

        return call

    for kind in (FlashCPU, Plain):
        for name in ("forward", "backward"):
            monkeypatch.setattr(kind, name, short(getattr(kind, name)))


def step(**extra: Any) -> list[torch.Tensor]:
    q, k, v, dout = numbers((2, 37, 3, 8), 0)
    torch.manual_seed(3)
    out = dilated_attention(q, k, v, **BRANCHES, **extra)
    assert isinstance(out, torch.Tensor)
    return [out, *torch.autograd.grad(out, (q, k, v), dout)]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), MemoryError(), TORCHS_OWN])
@pytest.mark.parametrize("most", [2, 5])
@pytest.mark.parametrize(
    "extra", [{}, {"kernel": "plain"}, {"detach_mixing": True}, "mask", {"dropout_p": 0.2}, BOTH]
)
def test_the_same_numbers_in_halves(
    extra: Any, most: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    if extra == "mask":
        extra = {"key_padding_mask": torch.arange(37).expand(2, 37) >= 30}
    expected = step(**extra)
    room_for(most, error, monkeypatch)
    with pytest.warns(RuntimeWarning, match="out of memory on .* segments of 3 heads .* going on in halves"):
        found = step(**extra)
    assert oracle.largest_difference(found, expected) <= 1e-12


def test_one_call_over_all_rows_goes_on_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    from reference_modules.attention import joint

    q, k, v, dout = numbers((1, 64, 2, 8), 0)
    options = {"segment_lengths": [8, 16], "dilation_rates": [1, 2]}

    def both() -> list[torch.Tensor]:
        out = dilated_attention(q, k, v, **options)
        return [out, *torch.autograd.grad(out, (q, k, v), dout)]

    expected = both()
    monkeypatch.setitem(joint.SLAB_BYTES, "cpu", 2 * 8 * 2 * 8 * 8)
    room_for(4, MemoryError(), monkeypatch)
    with pytest.warns(RuntimeWarning, match="out of memory on 8 segments of 2 heads and 8 rows.*in slabs"):
        found = both()
    assert oracle.largest_difference(found, expected) <= 1e-12


@pytest.mark.parametrize("content", [0, 1])
def test_chosen_blocks_go_on_in_halves(content: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from reference_modules.attention.block_work import _Part

    pattern = BlockPattern(block_size=4, local=1, stride=3, global_blocks=1, content=content)
    module = BlockSparseRingDilatedAttention([16, 32], [1, 2], pattern=pattern)
    q, k, v, dout = numbers((2, 37, 3, 8), 0)

    def both() -> list[torch.Tensor]:
        out = module(q, k, v, is_causal=True)
        return [out, *torch.autograd.grad(out, (q, k, v), dout)]

    expected, real = both(), _Part.gathered

    def short(self: _Part, *rest: Any) -> torch.Tensor:
        if self.rows.places.shape[2] > 2:
            raise MemoryError
        return real(self, *rest)

    monkeypatch.setattr(_Part, "gathered", short)
    with pytest.warns(RuntimeWarning, match="out of memory on .* query blocks with .* going on in halves"):
        found = both()
    assert oracle.largest_difference(found, expected) <= 1e-12


def test_what_fits_in_no_part_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    room_for(0, torch.OutOfMemoryError("no room at all"), monkeypatch)
    with pytest.raises(torch.OutOfMemoryError, match="no room at all"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step()


def test_other_errors_are_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    room_for(1, RuntimeError("a wrong shape"), monkeypatch)
    with pytest.raises(RuntimeError, match="a wrong shape"), warnings.catch_warnings():
        warnings.simplefilter("error")
        step()


def test_dropout_draws_alike_however_scores_are_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a block follow from the keys, so only segments and heads may be cut otherwise."""
    from reference_modules.attention import plain

    monkeypatch.setattr(plain, "_SCORES_PER_BLOCK", 16 * 8)
    expected = step(dropout_p=0.2)
    room_for(2, MemoryError(), monkeypatch)
    with pytest.warns(RuntimeWarning, match="going on in halves"):
        assert oracle.largest_difference(step(dropout_p=0.2), expected) <= 1e-12


def test_a_failure_in_one_pass_alone_draws_as_the_other_did(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = step(dropout_p=0.2)
    with monkeypatch.context() as only_backward:
        room_for(2, MemoryError(), only_backward)
        only_backward.setattr(Plain, "forward", FORWARD)
        found = step(dropout_p=0.2)
    assert oracle.largest_difference(found, expected) <= 1e-12


def test_dropped_blocks_are_not_halved_because_their_draws_would_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from reference_modules.attention.block_work import _Part

    module = BlockSparseRingDilatedAttention(
        [16], [1], dropout=0.2, pattern=BlockPattern(block_size=4, local=1)
    )
    q, k, v, _ = numbers((1, 32, 2, 8), 0)

    def short(self: _Part, *rest: Any) -> torch.Tensor:
        raise MemoryError

    monkeypatch.setattr(_Part, "gathered", short)
    with pytest.raises(MemoryError), warnings.catch_warnings():
        warnings.simplefilter("error")
        module(q, k, v)


def test_the_module_says_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    room_for(2, MemoryError(), monkeypatch)
    q, k, v, _ = numbers((1, 16, 3, 8), 0)
    with pytest.warns(RuntimeWarning, match="use shorter segments, smaller batches or more ranks"):
        DilatedAttention([8], [2])(q, k, v)
