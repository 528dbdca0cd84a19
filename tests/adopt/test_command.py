"""`poolaudit adopt` as a user runs it: what it writes, says and exits with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import poolaudit

MODULE = """\
import torch
from torch import nn


class Scores(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        b, n, d = x.shape
        total = torch.zeros(b, n, n, dtype=x.dtype)
        total[:] = x.sum()
        return total.sum()


class Plain:
    pass


class Keeps(nn.Module):
    def forward(self, x):
        b, n, d = x.shape
        table = torch.zeros(b, n, n)
        return table
"""

ADOPTED = """\
import torch
from reference_modules.mixin import MemoryPoolMixin
from torch import nn


class Scores(MemoryPoolMixin, nn.Module):
    def __init__(self, dim, enable_memory_pool: bool = False, memory_pool_threshold_mb=None):
        super().__init__()
        self._init_memory_pool(enable_memory_pool, memory_pool_threshold_mb)
        self.dim = dim

    def forward(self, x):
        b, n, d = x.shape
        with self._lease_tensor((b, n, n), x.dtype, None) as total:
            total[:] = x.sum()
            return total.sum()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODULE)
    return tmp_path


def test_a_module_that_makes_large_temporaries_is_found_and_adopted(project: Path) -> None:
    done = poolaudit("adopt", ".", cwd=project)
    assert (done.status, done.out) == (0, "")
    assert done.err == "adopted  model.py:5 Scores: 1 temporary, 5 edits\n1 adopted.\n"
    assert (project / "model.py").read_text() == ADOPTED + MODULE[MODULE.index("\n\nclass Plain") :]


def test_a_second_run_changes_nothing_and_says_so(project: Path) -> None:
    poolaudit("adopt", ".", "--class", "Scores", cwd=project)
    first = (project / "model.py").read_bytes()
    for arguments in ((".",), (".", "--class", "Scores"), (".", "--diff")):
        done = poolaudit("adopt", *arguments, cwd=project)
        assert (done.status, done.out) == (0, "")
        assert "already  model.py:6 Scores: adopted, nothing to do" in done.err
    assert (project / "model.py").read_bytes() == first


def test_diff_writes_nothing_and_can_be_applied(project: Path) -> None:
    done = poolaudit("adopt", ".", "--diff", cwd=project)
    assert done.status == 1
    assert (project / "model.py").read_text() == MODULE
    subprocess.run(["git", "apply", "-"], input=done.out.encode(), cwd=project, check=True)
    assert (project / "model.py").read_text().startswith(ADOPTED)


def test_what_may_not_be_pooled_is_refused_with_the_reason(project: Path) -> None:
    done = poolaudit("adopt", ".", "--class", "Keeps", cwd=project)
    assert done.status == 1
    assert "refused  model.py:21 Keeps: nothing that it makes may be pooled" in done.err
    assert "line 24: torch.zeros stays plain memory: it is returned" in done.err
    assert (project / "model.py").read_text() == MODULE


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ((".", "--class", "Score"), 2, "no class is called Score; did you mean Scores?"),
        ((".", "--class", "Zzzzzz"), 2, "no class is called Zzzzzz; the modules here are Keeps, Scores"),
        (("nowhere",), 2, "nowhere: no such file or directory"),
        ((".", "--class", "Plain"), 1, "refused  model.py:17 Plain: it is no nn.Module"),
        ((), 2, "Missing argument 'PATH ...'"),
        (("-",), 2, "`-` is standard input: adopt rewrites files"),
    ],
)
def test_wrong_use_is_told_with_a_way_out(
    project: Path, arguments: tuple[str, ...], status: int, said: str
) -> None:
    done = poolaudit("adopt", *arguments, cwd=project)
    assert done.status == status
    assert said in done.err
    assert "Traceback" not in done.err
    assert (project / "model.py").read_text() == MODULE


def test_a_file_that_does_not_parse_is_named_and_the_rest_goes_on(project: Path) -> None:
    (project / "broken.py").write_text("class Broken(:\n")
    done = poolaudit("adopt", ".", cwd=project)
    assert done.status == 2
    assert "broken.py:1: not valid Python" in done.err
    assert "adopted  model.py:5 Scores" in done.err


def test_a_named_file_without_a_class_is_read_all_the_same(project: Path) -> None:
    (project / "broken.py").write_text("def broken(:\n")
    done = poolaudit("adopt", "broken.py", "model.py", cwd=project)
    assert done.status == 2
    assert "broken.py:1: not valid Python" in done.err
    assert "adopted  model.py:5 Scores" in done.err


def test_nothing_to_adopt_says_what_one_can_do(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    done = poolaudit("adopt", "a.py", cwd=tmp_path)
    assert (done.status, done.out) == (0, "")
    assert "--class NAME adopts a class nevertheless" in done.err


def test_the_mixin_is_vendored_once_a_package(project: Path) -> None:
    inner = project / "pkg" / "deep"
    inner.mkdir(parents=True)
    for folder in (inner.parent, inner):
        (folder / "__init__.py").touch()
    for file in (inner / "model.py", inner.parent / "other.py"):
        file.write_text(MODULE)
    done = poolaudit("adopt", "pkg", "--class", "Scores", "--mixin", "vendor", cwd=project)
    assert done.status == 0, done.err
    assert "from ..memory_pool_mixin import MemoryPoolMixin" in (inner / "model.py").read_text()
    assert "from .memory_pool_mixin import MemoryPoolMixin" in (inner.parent / "other.py").read_text()
    assert [file.name for file in project.rglob("memory_pool_mixin.py")] == ["memory_pool_mixin.py"]
    run = (
        "import torch; from pkg.deep.model import Scores;"
        "print(Scores(4, True, 0.0)(torch.ones(1, 2, 4)).item())"
    )
    environment = {**os.environ, "PYTHONPATH": str(project)}
    ran = subprocess.run([sys.executable, "-c", run], env=environment, capture_output=True, text=True)
    assert (ran.stdout, ran.returncode) == ("32.0\n", 0), ran.stderr
    again = poolaudit("adopt", "pkg", "--class", "Scores", "--mixin", "vendor", "--diff", cwd=project)
    assert (again.status, again.out) == (0, "")


def test_a_file_of_that_name_that_is_no_mixin_is_left_alone(project: Path) -> None:
    (project / "memory_pool_mixin.py").write_text("mine = 1\n")
    done = poolaudit("adopt", ".", "--class", "Scores", "--mixin", "vendor", cwd=project)
    assert done.status == 1
    assert "exists and has no MemoryPoolMixin; rename it, or use --mixin import" in done.err
    assert (project / "model.py").read_text() == MODULE


def test_a_read_only_file_keeps_all_that_hang_together_as_they_are(project: Path) -> None:
    (project / "parent.py").write_text(
        "from torch import nn\nfrom model import Scores\n\n\nclass Parent(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.scores = Scores(4)\n"
    )
    (project / "model.py").chmod(0o444)
    before = (project / "parent.py").read_text()
    done = poolaudit("adopt", ".", "--class", "Parent", cwd=project)
    assert done.status == 1
    assert "model.py" in done.err
    assert "is read-only" in done.err
    assert (project / "parent.py").read_text() == before
    assert (project / "model.py").read_text() == MODULE


def test_it_needs_no_torch(project: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv[1:] = ['adopt', '.']; "
        "from auditor.cli import main; main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run([sys.executable, "-c", code], cwd=project, env=environment, capture_output=True)
    assert ran.returncode == 0, ran.stderr
