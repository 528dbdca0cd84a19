"""`adopt --verify`: tests before and after in copies, and nothing written that did not pass them."""

from pathlib import Path

import pytest

from auditor.adopt.run import Order, plan, with_copies, without
from auditor.leaktests.verify import verify
from tests.command_line import poolaudit

pytestmark = pytest.mark.slow

MODULE = """\
import torch
from torch import nn


class Scores(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        total = torch.zeros(b, n, d, dtype=x.dtype, device=x.device)
        total += self.proj(x)
        return total.sum()
"""


def test_what_passes_is_written(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODULE)
    done = poolaudit("adopt", ".", "--class", "Scores", "--verify", cwd=tmp_path, timeout=280)
    assert done.status == 0, done.err
    assert "_lease_tensor" in (tmp_path / "model.py").read_text()
    assert [each.name for each in tmp_path.iterdir()] == ["model.py"]


BROKEN = [
    ("vars(self).setdefault('kept', []).append(total); return total.sum()", "its leak test "),
    (
        "return total.sum() * 1.25",
        "its results change: Scores, training at (2, 32): output 0 differs in 1 of 1",
    ),
]


@pytest.mark.parametrize("line, reason", BROKEN)
def test_what_breaks_a_test_or_changes_numbers_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, reason: str
) -> None:
    (tmp_path / "model.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    planned = plan(Order((".",), ("Scores",), False, str(tmp_path)))
    [change] = with_copies(planned)
    broken = change.after.data.replace(b"return total.sum()", line.encode())
    object.__setattr__(change.after, "data", broken)
    why = verify([change])
    assert why["model.py"].startswith(reason)
    left = without(planned, why)
    assert (left.changes, left.outcomes[0].fate.value) == ((), "refused")


CONFIGURED = """\
import torch
from torch import nn


class Scores(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.proj = nn.Linear(args.width, args.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        total = torch.zeros(b, n, d, dtype=x.dtype, device=x.device)
        total += self.proj(x)
        return total.sum()
"""
CONFIG = """\
class ScoresConfig:
    def __init__(self, **given):
        self.width = given.pop("width", 64)
"""
RECIPE = """\
[[recipe]]
target = "model:Scores"
build = { args = "SimpleNamespace(width=64)" }
feed = { x = "torch.randn(b, n, 64, device=device)" }
imports = ["from types import SimpleNamespace"]
"""


def test_what_other_files_configure_is_found_there(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "model.py").write_text(CONFIGURED)
    (package / "config.py").write_text(CONFIG)
    done = poolaudit("adopt", ".", "--class", "Scores", "--verify", cwd=tmp_path, timeout=280)
    assert done.status == 0, done.err
    assert "_lease_tensor" in (package / "model.py").read_text()


def test_recipes_say_what_cannot_be_guessed(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(CONFIGURED)
    refused = poolaudit("adopt", ".", "--class", "Scores", "--verify", cwd=tmp_path, timeout=280)
    assert refused.status == 1
    assert "no leak test could be planned for it; a recipe may help" in " ".join(refused.err.split())
    assert (tmp_path / "model.py").read_text() == CONFIGURED
    (tmp_path / "recipes.toml").write_text(RECIPE)
    (tmp_path / "poolaudit.toml").write_text('recipes = "recipes.toml"\n')
    done = poolaudit("adopt", ".", "--class", "Scores", "--verify", cwd=tmp_path, timeout=280)
    assert done.status == 0, done.err
    assert "_lease_tensor" in (tmp_path / "model.py").read_text()
