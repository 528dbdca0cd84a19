"""What may be pooled: bodies of `forward`, each with what is said of the tensors that it makes."""

import ast
import textwrap

import pytest

from auditor.adopt.draft import Draft
from auditor.adopt.temporaries import Temporary, judged
from auditor.source.imports import origins

HEAD = """\
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

class M(nn.Module):
    def forward(self, x, w, cache):
        b, n, d = x.shape
"""


def verdicts(body: str, head: str = HEAD) -> list[str]:
    """`pooled`, or the reason, of each tensor that the body makes."""
    draft = Draft.of("m.py", head + textwrap.indent(textwrap.dedent(body), "        "))
    found = origins(draft.as_source)
    owner = next(node for node in draft.tree.body if isinstance(node, ast.ClassDef))
    return ["pooled" if isinstance(each, Temporary) else each.reason for each in judged(draft, owner, found)]


POOLED = {
    "summed": "t = torch.zeros(b, n, n)\nt[:, 0] = x[..., :1]\nreturn t.sum()",
    "added": "t = torch.zeros(b, n, n)\nt.masked_fill_(x > 0, -1e9)\nreturn x + t",
    "scaled by a number": "t = torch.zeros(b, n, n)\nt += x\nreturn t / 3",
    "scaled by a length": "t = torch.zeros(b, n, n)\nt += x\nreturn t / len(cache)",
    "an untracked buffer squared": "t = torch.full((n, n), 2.0)\nreturn (t ** 2).sum()",
    "written by out=": "t = torch.empty(b, n, n)\ntorch.matmul(x, w, out=t)\nreturn t.softmax(-1)",
    "result of out=": "t = torch.empty(b, n, n)\ny = torch.matmul(x, w, out=t)\nreturn y.sum()",
    "an expression": "return x + torch.tril(torch.ones(n, n))",
    "chained": "m = torch.ones(n, n).to(x)\nreturn x + m",
    "a view": "t = torch.zeros(b, n, n)\nrow = t[:, 0]\nrow += 1\nreturn t.view(-1).sum()",
    "parts": "t = torch.zeros(b, n, n)\na, c = t.chunk(2)\na.fill_(1)\nreturn a.sum() + c.sum()",
    "rebound": "t = torch.zeros(b, n, n)\nt = t + x\nreturn t",
    "deleted": "t = torch.zeros(b, n, n)\ny = t.sum()\ndel t\nreturn y",
    "in one branch": "if n > 4:\n    t = torch.zeros(b, n, n)\n    y = x + t\nelse:\n    y = x\nreturn y",
    "in both branches": (
        "if n > 4:\n    t = torch.zeros(b, n, n)\n    y = x + t\n"
        "else:\n    t = torch.ones(b, n, n)\n    y = x + t\nreturn y"
    ),
    "in a loop": "y = 0\nfor i in range(n):\n    t = torch.zeros(b, n, n)\n    y = y + t.sum()\nreturn y",
    "joined": "t = torch.zeros(b, n, d)\nreturn torch.cat([t, x], dim=1)",
    "under no_grad": "with torch.no_grad():\n    t = torch.ones(b, n, n)\n    y = x * t\nreturn y",
    "new_zeros": "t = x.new_zeros(b, n, n)\nreturn t.sum()",
    "gathered": "t = torch.empty(b, n, n)\ndist.all_gather_into_tensor(t, x)\nreturn t.sum(0)",
    "copied elsewhere": "t = torch.zeros(b, n, n)\ncache[:, 0] = t[0]\nreturn x",
    "asked": (
        "t = torch.zeros(b, n, n)\nt += x\nif t.isnan().any():\n    raise ValueError(t.shape)\nreturn t.sum()"
    ),
    "constants enough": "t = torch.zeros(4096, 4096)\nreturn t.sum()",
    "a list of sizes": "s = [b, n, n]\nt = torch.zeros(s)\nreturn t.sum()",
    "a shape": "s = x.shape\nt = torch.zeros(s)\nreturn t.sum()",
}

KEPT = {
    "returned": ("t = torch.zeros(b, n, n)\nreturn t", "it is returned"),
    "returned as a view": ("t = torch.zeros(b, n, n)\nreturn t.transpose(1, 2)", "it is returned"),
    "returned by another name": ("t = torch.zeros(b, n, n)\nu = t[0]\nreturn u", "it is returned"),
    "returned in a tuple": ("t = torch.zeros(b, n, n)\nreturn x, t", "it is returned"),
    "returned by out=": (
        "t = torch.empty(b, n, n)\ny = torch.matmul(x, w, out=t)\nreturn y",
        "it is returned",
    ),
    "returned by out= at once": (
        "t = torch.empty(b, n, n)\nreturn torch.matmul(x, w, out=t)",
        "it is returned",
    ),
    "returned after maybe": (
        "t = torch.zeros(b, n, n)\nif n:\n    t = t + x\nreturn t",
        "it is returned",
    ),
    "rebound to itself and returned": (
        "t = torch.zeros(b, n, n)\nu = t[0]\nu.sum()\nu = t[1]\nreturn u",
        "it is returned",
    ),
    "in-place result returned": ("t = torch.zeros(b, n, n)\nreturn t.add_(x)", "it is returned"),
    "through a dropout": ("t = torch.zeros(b, n, n)\nreturn F.dropout(t)", "it is returned"),
    "stored": ("t = torch.zeros(b, n, n)\nself.t = t\nreturn x", "it is stored in `self.t`"),
    "in a dict": ("t = torch.zeros(b, n, n)\ncache['t'] = t\nreturn x", "it is stored in"),
    "in a list": ("t = torch.zeros(b, n, n)\ncache.append(t)\nreturn x", "it is passed to `cache.append`"),
    "in a set": ("t = torch.zeros(b, n, n)\ncache.add(t)\nreturn x", "it is passed to `cache.add`"),
    "to unknown code": ("t = torch.zeros(b, n, n)\nreturn self.proj(t)", "it is passed to `self.proj`"),
    "multiplied": ("t = torch.zeros(b, n, n)\nreturn x * t", "autograd may keep it for `x * t`"),
    "matmul": ("t = torch.zeros(b, n, n)\nreturn torch.matmul(t, x)", "autograd may keep it for"),
    "matmul operator": ("t = torch.zeros(b, n, n)\nreturn t @ x", "autograd may keep it for `t @ x`"),
    "a mask": (
        "m = torch.ones(n, n)\nreturn x.masked_fill(m, 0)",
        "it is passed to `x.masked_fill`, which may keep it",
    ),
    "a condition": ("m = torch.ones(n, n)\nreturn torch.where(m, x, w)", "autograd may keep it for"),
    "an attention mask": (
        "m = torch.zeros(n, n)\nreturn F.scaled_dot_product_attention(x, x, x, attn_mask=m)",
        "autograd may keep it for",
    ),
    "an index": ("i = torch.zeros(b, n)\nreturn x[i]", "it is used as an index"),
    "tracked and exp_": ("t = torch.zeros(b, n, n)\nt += x\nt.exp_()\nreturn t.sum()", "since `x` may have"),
    "tracked and log": ("t = torch.zeros(b, n, n)\nt += x\nreturn t.log().sum()", "since `x` may have"),
    "tracked and squared": ("t = torch.zeros(b, n, n)\nt += x\nreturn (t ** 2).sum()", "since `x` may have"),
    "after the block": (
        "t = None\nif n:\n    t = torch.zeros(b, n, n)\nreturn x + t.sum()",
        "`t` is used outside of the block that makes it",
    ),
    "next turn": (
        "y = 0\nfor i in range(n):\n    if i:\n        y = y + t.sum()\n"
        "    t = torch.zeros(b, n, n)\n    t += 1\nreturn y",
        "`t` is read again in the next turn of a loop",
    ),
    "captured": (
        "t = torch.zeros(b, n, n)\ndef f():\n    return t.sum()\nreturn f()",
        "`t` is captured by a nested function",
    ),
    "never used": ("t = torch.zeros(b, n, n)\nreturn x", "nothing uses it"),
    "small": ("t = torch.zeros(n)\nreturn x + t.sum()", "it is small"),
    "like another": ("t = torch.zeros_like(x)\nreturn t.sum()", "the strides of another tensor"),
    "wants a gradient": (
        "t = torch.zeros(b, n, n, requires_grad=True)\nreturn t.sum()",
        "requires_grad=True",
    ),
    "a pinned one": ("t = torch.zeros(b, n, n, pin_memory=True)\nreturn t.sum()", "pin_memory=True"),
    "of unknown kind": ("t = torch.zeros(cache)\nreturn t.sum()", "`cache` may be one size or a whole shape"),
    "conditional": ("t = torch.zeros(b, n, n) if n else x\nreturn x + t.sum()", "under a condition"),
    "in a comprehension": (
        "return sum(torch.zeros(b, n, n).sum() for _ in range(3))",
        "inside of a comprehension",
    ),
    "asynchronous": (
        "t = torch.zeros(b, n, n)\ndist.all_reduce(t, async_op=True)\nreturn t.sum()",
        "which may still use it later",
    ),
    "a generator": ("t = torch.zeros(b, n, n)\nyield t.sum()", "generator"),
    "grad again": (
        "with torch.no_grad():\n    t = torch.ones(b, n, n)\n"
        "    with torch.enable_grad():\n        y = x * t\n    z = y\nreturn z",
        "autograd may keep it",
    ),
    "computed sizes": ("t = torch.zeros(b, self.width(), n)\nreturn t.sum()", "its arguments are calls"),
    "value decides the dtype": ("t = torch.full((n, n), self.v)\nreturn t.sum()", "the dtype follows from"),
    "two on a line": ("t = torch.zeros(b, n, n); y = t.sum()\nreturn y", "shares a line"),
}


@pytest.mark.parametrize("name", POOLED)
def test_true_temporaries_are_pooled(name: str) -> None:
    assert set(verdicts(POOLED[name])) == {"pooled"}


@pytest.mark.parametrize("name", KEPT)
def test_everything_else_stays_with_its_reason(name: str) -> None:
    body, reason = KEPT[name]
    [said] = verdicts(body)
    assert reason in said


def test_a_method_without_gradients_may_use_what_it_likes() -> None:
    head = HEAD.replace("    def forward", "    @torch.no_grad()\n    def forward")
    assert verdicts("t = torch.zeros(b, n, n)\nt += x\nreturn torch.where(t > 0, t, x) * t", head) == [
        "pooled"
    ]
    assert verdicts("t = torch.zeros(b, n, n)\nreturn self.proj(t)", head) != ["pooled"]


def test_only_the_forward_path_counts() -> None:
    head = HEAD.replace("forward", "benchmark")
    assert verdicts("t = torch.zeros(b, n, n)\nreturn t.sum()", head) == []
