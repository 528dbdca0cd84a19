"""Pool adoption: the marked projects, the summary's figures and the class table."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from auditor.config import Settings
from auditor.engine import Request, audit
from auditor.model import ClassRow, Finding, Run, Span
from auditor.project.adoption.adoption import Adoption, Followed, adoption
from auditor.project.adoption.pool_call import PoolCall
from auditor.rule import Rule, all_rules
from auditor.source.index import index_bytes

PROJECTS = sorted(
    path for path in (Path(__file__).parent / "fixtures" / "adoption").iterdir() if path.is_dir()
)
_MARK = re.compile(r"#\s*expect:\s*(PA\d{3}(?:\s*,\s*PA\d{3})*)")
_SETTINGS = re.compile(r"#\s*settings:\s*(\{.*\})")
Expected = tuple[str, int, str]  # path, line, code


def _run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The whole pipeline over a project whose settings, if any, stand in a file's first line."""
    monkeypatch.chdir(folder)
    given = [found for path in _files(folder) if (found := _SETTINGS.match(path.read_text()))]
    table = json.loads(given[0][1]) if given else {}
    settings = msgspec.convert({"select": ["ALL"], **table}, Settings)
    return audit(Request((".",), settings, folder, effort=True)).run


def _files(project: Path) -> list[Path]:
    return sorted(project.rglob("*.py"))


def _rules() -> list[Rule]:
    """The rules that have their fixtures here: the others' are run by tests of their own."""
    return [rule for rule in all_rules() if not rule.meta.code.startswith(("PA0", "PA1", "PA2", "PA5"))]


def _about_adoption(findings: tuple[Finding, ...]) -> list[Expected]:
    codes = {rule.meta.code for rule in _rules()}
    return sorted((each.span.path, each.span.line, each.code) for each in findings if each.code in codes)


def _expected(project: Path) -> list[Expected]:
    return sorted(
        (path.relative_to(project).as_posix(), number, code.strip())
        for path in _files(project)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (found := _MARK.search(line))
        for code in found[1].split(",")
    )


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_marks_are_what_is_reported(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(project, monkeypatch)
    assert run.failures == ()
    assert _about_adoption(run.findings) == _expected(project)


@pytest.mark.parametrize("rule", _rules(), ids=lambda rule: rule.meta.code)
def test_every_rule_has_marks_and_near_misses(rule: Rule) -> None:
    """A near miss is a class or function of the rule's own projects that has no mark of it."""
    own = [project for project in PROJECTS if project.name.startswith(rule.meta.code.lower())]
    marked = sum(code == rule.meta.code for project in own for _, _, code in _expected(project))
    texts = [path.read_text() for project in own for path in _files(project)]
    cases = sum(len(re.findall(r"^(?:class|def) ", text, re.M)) for text in texts)
    assert marked >= 2
    assert cases - marked >= 5 or rule.meta.code == "PA301"  # which is about imports


@pytest.mark.parametrize("rule", _rules(), ids=lambda rule: rule.meta.code)
def test_bad_fires_once_and_good_is_silent(
    rule: Rule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, wanted in ((rule.bad, {rule.meta.code}), (rule.good, set())):
        (tmp_path / "example.py").write_text(text)
        found = {code for _, _, code in _about_adoption(_run(tmp_path, monkeypatch).findings)}
        assert found == wanted


def _adopt(**sources: str) -> Adoption:
    """One file for each keyword, in the folder `pkg`."""
    return adoption([index_bytes(f"pkg/{name}.py", text.encode()) for name, text in sources.items()])


def _rows(found: Adoption) -> dict[str, ClassRow]:
    return {row.name: row for row in found.rows}


MIXIN = """
class MemoryPoolMixin:
    def _init_memory_pool(self, enable_memory_pool=False): ...
    def _allocate_tensor(self, shape, dtype, device): ...
    def _deallocate_tensor(self, tensor): ...
    def cleanup_memory_pool(self): ...
"""
USER = """
from torch import nn
from .{module} import {name}

class User({name}, nn.Module):
    def __init__(self, dim, enable_memory_pool: bool = {default}):
        super().__init__()
        self._init_memory_pool(enable_memory_pool)

    def forward(self, x):
        b, n, d = x.shape
        work = self._allocate_tensor((b, n, n), x.dtype, x.device)
        total = work.sum()
        self._deallocate_tensor(work)
        return total
"""


def test_figures_of_the_summary() -> None:
    found = _adopt(
        mixin=MIXIN,
        on=USER.format(module="mixin", name="MemoryPoolMixin", default=True),
        off=USER.format(module="mixin", name="MemoryPoolMixin", default=False).replace("User", "Off"),
        reads="import torch\n\ndef f(x):\n    return x.memory_pool_size\n",
        silent="import torch\n",
    )
    assert found.files_importing_pool == 2
    assert found.files_using_pool == 3
    assert (found.classes_with_pool_switch, found.switch_default_on, found.switch_default_off) == (2, 1, 1)


def test_a_user_of_the_mixin_is_fully_supported() -> None:
    row = _rows(_adopt(mixin=MIXIN, user=USER.format(module="mixin", name="MemoryPoolMixin", default=False)))[
        "User"
    ]
    assert (row.switch, row.switch_default) == ("enable_memory_pool", False)
    assert (row.acquires, row.releases, row.cleans_up, row.support) == (True, True, True, "full")
    assert (row.path, row.line, row.bases) == (
        "pkg/user.py",
        5,
        ("pkg.mixin.MemoryPoolMixin", "torch.nn.Module"),
    )
    assert row.priority is None


def test_a_switch_is_inherited_with_its_init_and_not_beyond() -> None:
    base = USER.format(module="mixin", name="MemoryPoolMixin", default=True)
    found = _adopt(
        mixin=MIXIN,
        user=base,
        children=(
            "from .user import User\n\nclass Same(User):\n    def memory_pool_note(self): ...\n\n"
            "class Own(User):\n"
            "    def __init__(self):\n        super().__init__(4, enable_memory_pool=False)\n"
        ),
    )
    rows = _rows(found)
    assert (rows["Same"].switch, rows["Same"].switch_default) == ("enable_memory_pool", True)
    assert rows["Own"].switch is None
    assert found.classes_with_pool_switch == 2


def test_an_own_init_ends_the_switch_in_a_file_that_names_no_pool() -> None:
    child = "from .user import User\n\nclass Child(User):\n{}    def forward(self, x): ...\n"
    for init, switch in (
        ("", "enable_memory_pool"),
        ("    def __init__(self):\n        super().__init__(4)\n", None),
    ):
        found = _adopt(
            mixin=MIXIN,
            user=USER.format(module="mixin", name="MemoryPoolMixin", default=True),
            child=child.format(init),
        )
        assert _rows(found)["Child"].switch == switch


@pytest.mark.parametrize(
    ("parameter", "switch", "default"),
    [
        ("enable_memory_pool: bool = True", "enable_memory_pool", True),
        ("use_memory_pool=False", "use_memory_pool", False),
        ("use_memory_pool: bool", "use_memory_pool", None),
        ("use_memory_pool: bool | None = None", "use_memory_pool", None),
        ("memory_pool=None", None, None),
        ("memory_pool_threshold_mb: float = 16.0", None, None),
        ("memory_pool_size=4", None, None),
        ("*, enable_memory_pool: bool = False", "enable_memory_pool", False),
    ],
)
def test_what_is_a_switch(parameter: str, switch: str | None, default: bool | None) -> None:
    text = f"class A:\n    def __init__(self, {parameter}):\n        self.x = 1\n"
    entry = index_bytes("a.py", text.encode()).classes[0]
    assert (entry.switch, entry.switch_default) == (switch, default)


def test_a_dataclass_field_is_a_parameter_of_its_init() -> None:
    text = "from dataclasses import dataclass\n\n@dataclass\nclass C:\n    enable_memory_pool: bool = True\n"
    assert index_bytes("a.py", text.encode()).classes[0].switch_default is True


def test_acquire_without_release_is_partial() -> None:
    text = USER.format(module="mixin", name="MemoryPoolMixin", default=False)
    row = _rows(_adopt(mixin=MIXIN, user=text.replace("        self._deallocate_tensor(work)\n", "")))["User"]
    assert (row.acquires, row.releases, row.support) == (True, False, "partial")


def test_what_is_kept_between_calls_needs_a_cleanup() -> None:
    text = """
class Cache:
    def __init__(self, memory_pool):
        self.pool = memory_pool
    def fill(self, n):
        self.block = self.pool.allocate(n)
    def refill(self):
        self.pool.deallocate(self.block)
"""
    assert _rows(_adopt(cache=text))["Cache"].support == "partial"
    cleaned = text + "    def close(self):\n        self.pool.deallocate(self.block)\n"
    assert _rows(_adopt(cache=cleaned))["Cache"].support == "full"


def test_the_flow_analysis_has_the_last_word() -> None:
    user = USER.format(module="mixin", name="MemoryPoolMixin", default=False)
    files = [index_bytes("pkg/mixin.py", MIXIN.encode()), index_bytes("pkg/user.py", user.encode())]
    call = PoolCall(Span("pkg/user.py", 12, 16, 12, 60), "User", "forward", "_allocate_tensor", False, True)
    found = adoption(files, Followed(frozenset({"pkg/user.py"}), calls=(call,)))
    assert (_rows(found)["User"].releases, _rows(found)["User"].support) == (False, "partial")
    unread = adoption(files, Followed(frozenset(), calls=(call,)))
    assert (_rows(unread)["User"].releases, _rows(unread)["User"].support) == (True, "full")


def test_a_module_with_scores_is_a_row_even_without_a_pool() -> None:
    text = """
import torch
from torch import nn

class Attention(nn.Module):
    def forward(self, q, k):
        b, h, n, d = q.shape
        return torch.zeros(b, h, n, n)

class Small(nn.Module):
    def forward(self, x):
        return x + 1
"""
    rows = _rows(_adopt(model=text))
    assert list(rows) == ["Attention"]
    row = rows["Attention"]
    assert (row.support, row.priority, row.estimated_bytes) == ("none", "high", "b*h*n*n*4")
    assert row.reason == "zeros of b, h, n, n: quadratic in n (4 bytes an element assumed)"


def test_re_exported_and_renamed_bases_are_found() -> None:
    files = [
        index_bytes("pkg/core/mixin.py", MIXIN.encode()),
        index_bytes("pkg/core/__init__.py", b"from .mixin import MemoryPoolMixin as PoolMixin\n"),
        index_bytes("pkg/user.py", USER.format(module="core", name="PoolMixin", default=False).encode()),
    ]
    assert _rows(adoption(files))["User"].cleans_up is True


def test_classes_that_inherit_from_each_other_end() -> None:
    text = "class A(B):\n    memory_pool = 1\n\n"
    text += "class B(A):\n    def f(self, pool):\n        return pool.allocate(1)\n"
    assert set(_rows(_adopt(cycle=text))) == {"A", "B"}
