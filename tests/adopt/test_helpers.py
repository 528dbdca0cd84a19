"""Functions beside a module: its pool is lent to them, and who else calls them notices nothing."""

from pathlib import Path

import pytest
import torch

from auditor.adopt.adoption import Fate
from reference_modules.mixin import set_memory_pool
from reference_modules.pool import TensorPool
from tests.adopt.test_rewriting import adopted
from tests.adopt.twins import identical, importable, module, ran

ATTENTION = '''\
import torch
from torch import nn


def attend(q, k, v, causal=True):
    """Plain attention."""
    sim = q @ k.transpose(-1, -2)
    i, j = sim.shape[-2:]
    if causal:
        mask = torch.ones((i, j), dtype=torch.bool, device=q.device).triu(j - i + 1)
        sim = torch.where(mask, float("-inf"), sim)
    return sim.softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x):
        return attend(*self.qkv(x).chunk(3, -1))


class Cross(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.inner = Attention(dim)

    def forward(self, x):
        return self.inner(x) + attend(x, x, x, causal=False)


def score(x):
    return attend(x, x, x)
'''
AFTER = '''\
import torch
from reference_modules.mixin import MemoryPoolMixin
from torch import nn


def attend(q, k, v, causal=True, *, lease_tensor=MemoryPoolMixin()._lease_tensor):
    """Plain attention."""
    sim = q @ k.transpose(-1, -2)
    i, j = sim.shape[-2:]
    if causal:
        with lease_tensor((i, j), torch.bool, q.device, zero_init=False) as ones:
            mask = ones.fill_(1).triu(j - i + 1)
        sim = torch.where(mask, float("-inf"), sim)
    return sim.softmax(-1) @ v


class Attention(MemoryPoolMixin, nn.Module):
    def __init__(self, dim, enable_memory_pool: bool = False, memory_pool_threshold_mb=None):
        super().__init__()
        self._init_memory_pool(enable_memory_pool, memory_pool_threshold_mb)
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x):
        return attend(*self.qkv(x).chunk(3, -1), lease_tensor=self._lease_tensor)


class Cross(MemoryPoolMixin, nn.Module):
    def __init__(self, dim, enable_memory_pool: bool = False, memory_pool_threshold_mb=None):
        super().__init__()
        self._init_memory_pool(enable_memory_pool, memory_pool_threshold_mb)
        self.inner = Attention(
            dim,
            enable_memory_pool=enable_memory_pool,
            memory_pool_threshold_mb=memory_pool_threshold_mb,
        )

    def forward(self, x):
        return self.inner(x) + attend(x, x, x, causal=False, lease_tensor=self._lease_tensor)


def score(x):
    return attend(x, x, x)
'''


def test_the_function_takes_a_lender_and_its_modules_are_it(tmp_path: Path) -> None:
    planned, after = adopted(tmp_path, ATTENTION, "Cross")
    assert after.decode() == AFTER
    assert [each.fate for each in planned.outcomes] == [Fate.ADOPTED, Fate.ADOPTED]
    again, text = adopted(tmp_path, AFTER, "Cross")
    assert text.decode() == AFTER
    assert {each.fate for each in again.outcomes} == {Fate.ALREADY}


@pytest.mark.parametrize("train", [False, True])
def test_the_same_bits_off_and_on_and_the_pool_is_used(tmp_path: Path, train: bool) -> None:
    for name, text in (("helped_plain", ATTENTION), ("helped_pooled", AFTER)):
        (tmp_path / f"{name}.py").write_text(text)
    x = torch.randn(2, 40, 16)
    with importable(tmp_path), TensorPool("cpu", threshold_mb=0, debug=True) as pool:
        plain, pooled = module("helped_plain"), module("helped_pooled")
        models = [each.Cross(16) for each in (plain, pooled)]
        models[1].load_state_dict(models[0].state_dict())
        expected = ran(models[0], lambda model: model(x), train=train)
        assert identical(expected, ran(models[1], lambda model: model(x), train=train))
        assert pool.stats().misses == 0
        assert set_memory_pool(models[1], pool) == 2
        for _ in range(3):
            assert identical(expected, ran(models[1], lambda model: model(x), train=train))
        assert torch.equal(plain.score(x), pooled.score(x))
        figures = pool.stats()
        assert (figures.hits, figures.misses, figures.leases) == (2, 1, 0)


MASKED = """\
import functools
import torch
from torch import nn


{head}
    mask = torch.ones((n, n), dtype=torch.bool).triu(1)
    return {value}


class M(nn.Module):
    def forward(self, x):
        return {call}
"""


def text_of(
    head: str = "def masked(x, n):",
    value: str = "x.masked_fill(mask, 0.0)",
    call: str = "masked(x, x.shape[-1])",
) -> str:
    return MASKED.format(head=head, value=value, call=call)


@pytest.mark.parametrize(
    "text, reason",
    [
        (text_of("@functools.cache\ndef masked(x, n):"), "`masked` is wrapped by `functools.cache`"),
        (text_of("async def masked(x, n):"), "`masked` is asynchronous"),
        (text_of(value="(yield x.masked_fill(mask, 0.0))"), "`masked` is a generator"),
        (text_of("def masked(x, n, lease_tensor=None):"), "`masked` has a `lease_tensor` of its own"),
    ],
)
def test_what_cannot_be_lent_a_pool_says_why(tmp_path: Path, text: str, reason: str) -> None:
    planned, after = adopted(tmp_path, text, "M")
    [outcome] = planned.outcomes
    assert outcome.fate is Fate.REFUSED
    assert outcome.kept[0].reason.startswith(reason)
    assert after.decode() == text


@pytest.mark.parametrize(
    "text",
    [
        text_of() + "\n\nmasked = functools.partial(masked)\n",
        text_of() + "\n\ndef masked(x, n):\n    return x\n",
        text_of(call="(lambda masked: masked(x, 3))(max)"),
    ],
)
def test_a_name_that_may_stand_for_something_else_is_left(tmp_path: Path, text: str) -> None:
    planned, after = adopted(tmp_path, text, "M")
    assert planned.outcomes[0].fate is Fate.REFUSED
    assert after.decode() == text


@pytest.mark.parametrize(
    "head, became",
    [
        (
            "def masked(x, n, *, k=1):",
            "def masked(x, n, *, k=1, lease_tensor=MemoryPoolMixin()._lease_tensor):",
        ),
        ("def masked(x, *n):", "def masked(x, *n, lease_tensor=MemoryPoolMixin()._lease_tensor):"),
        ("def masked(x, n, /):", "def masked(x, n, /, *, lease_tensor=MemoryPoolMixin()._lease_tensor):"),
        ("def masked(x, n, **k):", "def masked(x, n, *, lease_tensor=MemoryPoolMixin()._lease_tensor, **k):"),
        (
            "@torch.no_grad()\ndef masked(\n    x,\n    n,\n):",
            "@torch.no_grad()\ndef masked(\n    x,\n    n,\n    *,\n"
            "    lease_tensor=MemoryPoolMixin()._lease_tensor,\n):",
        ),
    ],
)
def test_signatures_of_every_form(tmp_path: Path, head: str, became: str) -> None:
    _, after = adopted(tmp_path, text_of(head), "M")
    assert became in after.decode()
    assert "return masked(x, x.shape[-1], lease_tensor=self._lease_tensor)" in after.decode()
