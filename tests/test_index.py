"""The index: what is read from bytes, and from a syntax tree for its modules or for its pools too."""

import textwrap
from pathlib import Path

import pytest

from auditor.model import Span
from auditor.source.index import FileIndex, LargeAllocation, Need, index_bytes, index_file, prefilter
from auditor.source.searched import Searched

FIXTURES = sorted((Path(__file__).parent / "fixtures").rglob("*.py"))


def _allocations(body: str, parameters: str = "q, k, v, x, mask") -> list[LargeAllocation]:
    """What a module whose forward is `body` allocates."""
    head = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\nclass M(nn.Module):\n"
    text = f"{head}    def forward(self, {parameters}):\n{textwrap.indent(textwrap.dedent(body), ' ' * 8)}\n"
    found = list(index_file("m.py", text).classes[0].allocations)
    assert found == list(index_file("m.py", text, Need.MODULES).classes[0].allocations)
    return found


@pytest.mark.parametrize(
    ("text", "need"),
    [
        (b"", Need.NOTHING),
        (b"import torch\nx = torch.zeros(4096, 4096)\n", Need.NOTHING),
        (b"class Layer(nn.Module):\n    pass\n", Need.MODULES),
        (b"class Layer(Base):\n    def forward(self): ...\n", Need.MODULES),
        (b"from x import memory_pool\n", Need.WHOLE),
        (b"self.enable_memory_pool = True\n", Need.WHOLE),
        (b"pool: MemoryPool\n", Need.WHOLE),
        (b"class TensorPool:\n    pass\n", Need.WHOLE),
        (b"class AvgPool2d(nn.Module): ...\n", Need.MODULES),
    ],
)
def test_the_prefilter_decides_from_bytes(text: bytes, need: Need) -> None:
    assert prefilter(Searched(text)) is need


@pytest.mark.parametrize(
    ("data", "lines"), [(b"", 0), (b"\n", 1), (b"a = 1", 1), (b"a = 1\n", 1), (b"a = 1\n\nb = 2", 3)]
)
def test_lines_are_counted_alike_with_and_without_a_parse(data: bytes, lines: int) -> None:
    assert index_bytes("a.py", data).lines == lines
    assert index_file("a.py", data.decode()).lines == lines


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name)
def test_modules_are_read_alike_whether_or_not_pools_are_looked_for(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    whole, cut = (index_file("f.py", text, need) for need in (Need.WHOLE, Need.MODULES))
    assert [_forward_view(each) for each in cut.classes] == [
        _forward_view(each) for each in whole.classes if "<locals>" not in each.qualname
    ]


def _forward_view(entry: object) -> tuple[object, ...]:
    return tuple(getattr(entry, name) for name in ("qualname", "span", "bases", "is_module", "allocations"))


def test_a_broken_file_is_an_error_however_much_is_read() -> None:
    for need in (Need.WHOLE, Need.MODULES):
        with pytest.raises(SyntaxError):
            index_file("a.py", "class A(nn.Module:\n    def forward(self): ...\n", need)


def test_columns_count_characters_from_one() -> None:
    text = 'π = "π"; import project.memory_pool\nπ = "π"; class_ = 1\n'
    (found,) = index_file("a.py", text).pool_imports
    assert found.span == Span("a.py", 1, 10, 1, 36)


def test_a_class_is_underlined_by_its_name() -> None:
    (entry,) = index_file("a.py", "@d\nclass  Long(\n    Base,\n): pass\n").classes
    assert entry.span == Span("a.py", 2, 1, 2, 12)


def test_bases_are_resolved_through_the_imports() -> None:
    text = """
import torch.nn as nn
import torch
from .layers import Base as B
from ..core import mixin
from typing import Generic

class A(nn.Module, B, mixin.Pool, torch.nn.Linear, Generic[T], Local): ...
"""
    (entry,) = index_file("pkg/sub/model.py", text).classes
    assert entry.bases == (
        "torch.nn.Module",
        "pkg.sub.layers.Base",
        "pkg.core.mixin.Pool",
        "torch.nn.Linear",
        "typing.Generic",
        "Local",
    )
    assert entry.is_module


@pytest.mark.parametrize(
    ("body", "operation", "shape", "size", "weight"),
    [
        ("b, n, h, d = q.shape\ns = torch.zeros(b, h, n, n)", "zeros", "b, h, n, n", "b*h*n*n*4", 3),
        ("b, n, h, d = q.size()\ns = torch.empty((b, n, h, d))", "empty", "b, n, h, d", "b*n*h*d*4", 2),
        ("n = x.size(1)\nm = torch.ones(n, n, dtype=torch.bool)", "ones", "n, n", "n*n*1", 3),
        (
            "seq_len = x.shape[1]\nm = torch.tril(torch.ones(seq_len, seq_len))",
            "tril",
            "seq_len, seq_len",
            "seq_len*seq_len*4",
            3,
        ),
        ("b, n, d = x.shape\ns = x.new_full((b, n, d), 0.0)", "new_full", "b, n, d", "b*n*d*4", 1),
        (
            "b, n, d = x.shape\ns = torch.zeros_like(x, dtype=torch.float64)",
            "zeros_like",
            "b, n, d",
            "b*n*d*8",
            1,
        ),
        ("b, n, d = x.shape\ns = torch.empty(x.shape)", "empty", "b, n, d", "b*n*d*4", 1),
        ("b, n, d = x.shape\ns = torch.empty(*x.shape[:-1], n)", "empty", "b, n, n", "b*n*n*4", 3),
        (
            "b, n, d = x.shape\nsize = (b, n, 3 * d)\ns = torch.empty(size)",
            "empty",
            "b, n, 3*d",
            "b*n*(3*d)*4",
            1,
        ),
        ("t = torch.zeros(2048, 4096)", "zeros", "2048, 4096", "2048*4096*4", 2),
        ("w = 8192\nt = torch.zeros(w, w)", "zeros", "8192, 8192", "8192*8192*4", 3),
        (
            "b, h, n, d = q.shape\ns = torch.matmul(q, q.transpose(-1, -2))",
            "matmul",
            "b, h, n, n",
            "b*h*n*n*4",
            3,
        ),
        ("b, h, n, d = q.shape\ns = q @ q.mT", "@", "b, h, n, n", "b*h*n*n*4", 3),
        (
            "s = torch.matmul(q, k.transpose(2, 3))",
            "matmul",
            "q.shape[:-1].numel(), k.shape[-2]",
            "q.shape[:-1].numel()*k.shape[-2]*4",
            3,
        ),
        ("s = torch.einsum('bhid,bhjd->bhij', q, k)", "einsum", "b, h, n_q, n_k", "b*h*n_q*n_k*4", 3),
        (
            "b, n, h, d = q.shape\ns = torch.einsum('bnhd,bmhd->bhnm', q, q)",
            "einsum",
            "b, h, n, n",
            "b*h*n*n*4",
            3,
        ),
        (
            "n = x.size(1)\np = torch.arange(n)\nm = p[:, None] - p[None, :]",
            "outer product of positions",
            "n, n",
            "n*n*8",
            3,
        ),
        (
            "n = x.size(1)\np = torch.arange(n)\nm = p[:, None] >= p[None, :]",
            "outer product of positions",
            "n, n",
            "n*n*1",
            3,
        ),
        ("b, n, d = x.shape\ny = torch.cat([x, x], dim=1)", "cat", "b, 2*n, d", "b*(2*n)*d*4", 1),
        ("b, n, d = x.shape\ny = torch.stack((x, x))", "stack", "2, b, n, d", "2*b*n*d*4", 1),
        ("b, n, d = x.shape\ny = x.unsqueeze(2).repeat(1, 1, 8, 1)", "repeat", "b, n, 8, d", "b*n*8*d*4", 1),
        ("s = torch.zeros_like(q)", "zeros_like", "q.numel()", "q.numel()*4", 1),
        ("b, n, d = x.shape\ny = F.one_hot(x, 100)", "one_hot", "b, n, d, 100", "b*n*d*100*8", 1),
    ],
)
def test_a_large_allocation(body: str, operation: str, shape: str, size: str, weight: int) -> None:
    found = max(_allocations(body), key=lambda each: (each.weight, each.span.column * -1))
    assert (found.operation, found.shape, found.bytes, found.weight) == (operation, shape, size, weight)


@pytest.mark.parametrize(
    "body",
    [
        "b, n, h, d = q.shape\nreturn q.view(b, n, h * d)",
        "b, n, h, d = q.shape\nreturn q.transpose(1, 2).reshape(b, h, n * d)",
        "b, n, h, d = q.shape\nreturn q.unsqueeze(1).expand(b, 4, n, h, d)",
        "b, n, h, d = q.shape\nq.mul_(2)\nq[:, 0] = 1\nreturn q.zero_()",
        "b, n, h, d = q.shape\nreturn torch.zeros(d) + torch.ones(h, d)",
        "b, n, h, d = q.shape\nreturn torch.zeros(b, self.heads, self.dim)",
        "b, n, h, d = q.shape\nreturn torch.zeros(b, n)",
        "return torch.zeros(1)",
        "return torch.zeros(512, 512)",
        "return torch.empty(0, 4096, 4096)",
        "return torch.matmul(x, self.weight.transpose(0, 1))",
        "return torch.matmul(x, mask.transpose(1, 2))",
        "return torch.einsum('bhij,bhjd->bhid', q, v)",
        "return torch.einsum('bnd,de->bne', q, self.w)",
        "return torch.zeros(shape)",
        "return torch.zeros_like(mask)",
        "return torch.zeros_like(self.weight)",
        "n = x.size(1)\nn = 4\nreturn torch.zeros(n, n)",
    ],
)
def test_what_is_not_large_or_not_new(body: str) -> None:
    assert _allocations(body) == []


def test_only_the_forward_path_counts() -> None:
    text = """
import torch
from torch import nn

class M(nn.Module):
    def __init__(self, n_tokens):
        n, m = n_tokens, n_tokens
        self.mask = torch.ones(n, m)

    def forward(self, x):
        return self.one(x)

    def one(self, x):
        return self.two(x)

    def two(self, x):
        n = x.size(1)
        return torch.zeros(n, n)

    def unused(self, x):
        n = x.size(1)
        return torch.zeros(n, n, n)
"""
    for need in (Need.WHOLE, Need.MODULES):
        (entry,) = index_file("m.py", text, need).classes
        assert [(each.shape, each.span.line) for each in entry.allocations] == [("n, n", 18)]


def test_pool_use_is_an_attribute_and_not_a_name() -> None:
    assert index_bytes("a.py", b"x.enable_memory_pool = 1\n").uses_pool
    assert not index_bytes("a.py", b"memory_pool = 1\n").uses_pool


def test_a_byte_order_mark_and_an_empty_file() -> None:
    assert index_file("a.py", "\ufeffimport x.memory_pool\nx.memory_pool.f()\n").pool_imports[0].used
    assert index_bytes("a.py", b"") == FileIndex("a.py", 0)


def test_what_is_said_of_a_class_does_not_hang_on_whether_it_allocates() -> None:
    text = "class A(nn.Module):\n    class Inner: ...\n    @abstractmethod\n    def forward(self): ...\n"
    for need in (Need.WHOLE, Need.MODULES):
        outer, inner = index_file("a.py", text, need).classes
        assert (outer.is_abstract, inner.qualname) == (True, "A.Inner")


def test_lines_that_end_in_a_carriage_return_alone_are_lines() -> None:
    text = "import torch\rclass A(nn.Module):\r    def forward(self): ...\r"
    (entry,) = index_file("a.py", text, Need.MODULES).classes
    assert entry.span == Span("a.py", 2, 1, 2, 8)
