"""Fixes of PA303 to PA305 and PA401 to PA405 by `poolaudit fix`: applied, gone, nothing left to do."""

import shutil
from pathlib import Path

import pytest

from tests.command_line import Done, poolaudit

FIXTURES = Path(__file__).parents[1] / "fixtures" / "adoption"


def fixed(folder: Path, code: str, *more: str) -> Done:
    options = ("--unsafe-fixes", "--isolated", "--no-cache", "--no-progress")
    return poolaudit("fix", ".", "--select", code, *options, *more, cwd=folder)


def copied(name: str, to: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name, to / name))


EXPECTED = {
    "pa303": ("incomplete.py", "finally:\n            self.memory_pool.deallocate(scores)\n", 4, 0),
    "pa304": ("not_handed_on.py", "Attention(dim, 8, enable_memory_pool=enable_memory_pool)\n", 4, 0),
    "pa401": ("modules.py", "    def _deallocate_tensor(self, tensor):\n", 2, 1),
    "pa402": ("switches.py", "enable_memory_pool: bool = False):  # expect: PA402\n", 2, 0),
    "pa403": ("switches.py", "self.pool = pool if enable_memory_pool else None\n", 1, 1),
    "pa404": ("only_in_del.py", "    def __del__(self):\n        self.close()\n", 2, 0),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_findings_are_fixed_and_a_second_run_changes_nothing(tmp_path: Path, name: str) -> None:
    file, expected, count, left = EXPECTED[name]
    folder = copied(name, tmp_path)
    before = (folder / file).read_text()
    done = fixed(folder, name.upper())
    assert done.status == 0, done.err
    after = (folder / file).read_text()
    assert after.count(expected) > before.count(expected)
    compile(after, file, "exec")
    audited = poolaudit("audit", ".", "--select", name.upper(), "--isolated", "--format", "json", cwd=folder)
    assert len(audited.json["findings"]) == left
    assert f"Fixed {count} finding" in done.err
    again = fixed(folder, name.upper(), "--diff")
    assert (again.status, again.out) == (0, "")


def test_without_unsafe_fixes_nothing_is_done(tmp_path: Path) -> None:
    folder = copied("pa402", tmp_path)
    done = poolaudit("fix", ".", "--select", "PA402", "--isolated", "--no-cache", "--diff", cwd=folder)
    assert (done.status, done.out) == (0, "")


MIXIN = """\
import torch
from torch import nn

from reference_modules.mixin import MemoryPoolMixin


class Block(MemoryPoolMixin, nn.Module):
    def __init__(self, enable_memory_pool: bool = False, memory_pool_threshold_mb=None):
        super().__init__()
        self._init_memory_pool(enable_memory_pool, memory_pool_threshold_mb)

    def forward(self, x):
        b, n, d = x.shape
        with self._lease_tensor((b, n, n), x.dtype, x.device) as work:
            table = torch.zeros(b, n, n, dtype=x.dtype)
            table += work
            total = table.sum()
        return total
"""


def test_a_bypass_goes_through_the_mixin(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(MIXIN)
    done = fixed(tmp_path, "PA305")
    assert "Fixed 1 finding" in done.err, done.err
    assert (
        "            with self._lease_tensor((b, n, n), x.dtype, None) as table:\n"
        "                table += work\n                total = table.sum()\n        return total\n"
    ) in (tmp_path / "m.py").read_text()


SWITCHES = """\
class {name}:
    def __init__(self, pool, {switch}: bool = False):
        self.pool = pool if {switch} else None


"""


def _switches() -> str:
    names = ("enable_memory_pool", "enable_memory_pool", "enable_memory_pool", "use_memory_pool")
    return "".join(SWITCHES.format(name=f"C{at}", switch=name) for at, name in enumerate(names))


def test_callers_in_other_files_follow_a_renamed_switch(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(_switches())
    (tmp_path / "b.py").write_text(
        "from a import C3\n\n\nclass Heir(C3):\n    def __init__(self, pool):\n"
        "        super().__init__(pool, use_memory_pool=True)\n\n\nthing = C3(None, use_memory_pool=False)\n"
    )
    done = fixed(tmp_path, "PA403")
    assert "Fixed 1 finding" in done.err, done.err
    text = (tmp_path / "b.py").read_text()
    assert "use_memory_pool" not in text
    assert "super().__init__(pool, enable_memory_pool=True)" in text
    assert "C3(None, enable_memory_pool=False)" in text


@pytest.mark.parametrize(
    "other",
    [
        'x = {"use_memory_pool": True}\n',
        "def make(build):\n    return build(use_memory_pool=True)\n",
    ],
)
def test_a_name_that_may_be_used_elsewhere_is_left(tmp_path: Path, other: str) -> None:
    (tmp_path / "a.py").write_text(_switches())
    (tmp_path / "b.py").write_text(other)
    done = fixed(tmp_path, "PA403")
    assert "without a fix" in done.err
    assert (tmp_path / "a.py").read_text() == _switches()


COPIES = """\
import torch


class PooledMixin:
    def _allocate_tensor(self, shape, dtype):
        if self.memory_pool is None:
            return torch.empty(shape, dtype=dtype)
        return self.memory_pool.allocate(shape, dtype)


class Ring:
    def __init__(self, memory_pool):
        self.memory_pool = memory_pool

    def _allocate_tensor(self, shape, dtype):
        if self.memory_pool is None:
            return torch.empty(shape, dtype=dtype)
        return self.memory_pool.allocate(shape, dtype)

    def size(self):
        return 4
"""


def test_a_copy_gives_way_to_the_mixin_that_it_was_copied_from(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(COPIES)
    done = fixed(tmp_path, "PA405")
    assert "Fixed 1 finding" in done.err, done.err
    assert (
        (tmp_path / "m.py")
        .read_text()
        .endswith(
            "class Ring(PooledMixin):\n    def __init__(self, memory_pool):\n"
            "        self.memory_pool = memory_pool\n\n"
            "    def size(self):\n        return 4\n"
        )
    )
