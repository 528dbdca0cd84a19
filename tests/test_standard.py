"""The project's standard: settings first, else a majority; what is told of it, and what adopting costs."""

from dataclasses import replace

import pytest

from auditor.config import StandardNames
from auditor.model import Span, SwitchUse
from auditor.project.adoption.adoption import Adoption, Followed, adoption
from auditor.project.adoption.pool_call import PoolCall, outside_of_wrappers
from auditor.source.index import index_bytes

SWITCHED = (
    "class {name}:\n    def __init__(self, pool, {switch}: bool = {default}):\n        self.pool = pool\n\n\n"
)


def _project(*switches: tuple[str, str], settings: StandardNames | None = None) -> Adoption:
    text = "".join(
        SWITCHED.format(name=f"C{at}", switch=switch, default=default)
        for at, (switch, default) in enumerate(switches)
    )
    return adoption([index_bytes("pkg/a.py", text.encode())], None, settings)


OFF, ON, OTHER = ("enable_memory_pool", "False"), ("enable_memory_pool", "True"), ("use_memory_pool", "False")


@pytest.mark.parametrize(
    ("switches", "name", "default"),
    [
        ((), None, None),
        ((OFF,), None, False),
        ((OFF, OFF), None, False),
        ((OFF, OFF, OFF), "enable_memory_pool", False),
        ((OFF, ON), None, None),
        ((ON, ON, OFF), "enable_memory_pool", True),
        ((OFF, OFF, OFF, OTHER, OTHER), "enable_memory_pool", False),
        ((OFF, OFF, OFF, OTHER, OTHER, OTHER), None, False),
    ],
)
def test_a_majority_of_at_least_three_names_the_switch(
    switches: tuple[tuple[str, str], ...], name: str | None, default: bool | None
) -> None:
    found = _project(*switches).standard
    assert (found.switch, found.default, found.declared) == (name, default, frozenset())


def test_settings_win_and_are_named_as_the_source() -> None:
    settings = StandardNames(switch="use_memory_pool", default=True)
    found = _project(OFF, OFF, OFF, settings=settings).standard
    assert (found.switch, found.default) == ("use_memory_pool", True)
    assert (found.says("switch"), found.says("acquire")) == ("the settings say", "most classes here say")


def test_switches_are_counted_by_name_the_most_frequent_first() -> None:
    found = _project(OTHER, OFF, ON, ("enable_memory_pool", "None"), OFF).conventions
    assert found.switches == (SwitchUse("enable_memory_pool", 1, 2, 1), SwitchUse("use_memory_pool", 0, 1, 0))


def _call(line: int, method: str, name: str, **others: bool) -> PoolCall:
    given = {"releases": False, "on_self": True, **others}
    return PoolCall(Span("pkg/m.py", line, 1, line, 9), "M", method, name, **given)


def test_the_body_of_a_wrapper_is_not_the_class_s_own_use() -> None:
    inside = _call(3, "_take", "allocate", on_self=False)
    use, quiet = _call(9, "forward", "_take"), _call(10, "forward", "scores", speaks=False)
    assert outside_of_wrappers([inside, use, quiet]) == [use]
    assert outside_of_wrappers([inside]) == [inside]


MODULE = """
import torch
from torch import nn

class M(nn.Module):
    def forward(self, x, out):
        b, n, d = x.shape
        work = torch.zeros(b, n, n)
        out.copy_(work.sum())
        return out
"""


@pytest.mark.parametrize(
    ("text", "edits"),
    [
        (MODULE, 4),  # import, base, a constructor of its own, and the temporary
        (
            MODULE.replace(
                "    def forward", "    def __init__(self):\n        super().__init__()\n\n    def forward"
            ),
            5,
        ),
        (MODULE.replace("return out", "return work"), None),  # it leaves the module: there is nothing to pool
    ],
)
def test_effort_of_a_module_without_support(text: str, edits: int | None) -> None:
    rows = adoption([index_bytes("pkg/m.py", text.encode())]).rows
    assert [(row.support, row.edits) for row in rows] == [("none", edits)]


def test_effort_of_finishing_what_never_releases() -> None:
    text = "class M:\n    def forward(self, memory_pool):\n        return memory_pool.allocate(8).sum()\n"
    calls = (_call(3, "forward", "allocate", on_self=False), _call(4, "forward", "allocate", on_self=False))
    file = index_bytes("pkg/m.py", text.encode())
    [row] = adoption([file], Followed(frozenset({file.path}), calls)).rows
    assert (row.support, row.edits) == ("partial", 2)
    released = replace(calls[1], releases=True, name="deallocate")
    [row] = adoption([file], Followed(frozenset({file.path}), (calls[0], released))).rows
    assert (row.support, row.edits) == ("full", None)
