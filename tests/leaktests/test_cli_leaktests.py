"""`poolaudit leaktests` as a user runs it: hostile trees, recipes, wrong use."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from auditor.leaktests.workshop import WorkshopError, need_pytest, workshop
from tests.leaktests.hostile import SAID, write_hostile_tree

PROJECT = Path(__file__).parent.parent.parent


def poolaudit(folder: Path, *arguments: str, timeout: int = 280) -> subprocess.CompletedProcess[str]:
    """The command, never with a traceback."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(
        [sys.executable, "-m", "auditor.cli", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return done


@pytest.mark.slow
def test_each_hostile_module_is_one_named_failure_and_the_rest_runs(tmp_path: Path) -> None:
    write_hostile_tree(tmp_path)
    done = poolaudit(tmp_path, "leaktests", ".", "--isolated", "--timeout", "4", "--output", "generated")
    assert done.returncode == 1, done.stderr
    lines = {line.split(": ")[1]: line for line in done.stdout.splitlines() if not line.startswith(" ")}
    assert set(lines) == set(SAID)
    for name, said in SAID.items():
        assert f": {name}: {said}" in lines[name]
    stack = done.stdout.partition("its stack follows")[2].splitlines()[1]
    assert 'hangs.py", line 7 in forward' in stack
    assert sorted(file.name for file in (tmp_path / "generated").glob("test_*.py")) == [
        "test_leaks_honest_Honest.py",
        "test_leaks_two_in_one_Second.py",
    ]
    assert "Plans for 2 of 12 modules." in done.stderr


@pytest.mark.slow
def test_a_recipe_plans_what_could_not_be_guessed_and_a_draft_names_it(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Odd(nn.Module):\n"
        "    def forward(self, blob):\n        return blob['payload'] * 2\n\n\n"
        "class Left(nn.Module):\n    def forward(self, blob):\n        return blob['x']\n"
    )
    done = poolaudit(tmp_path, "leaktests", "odd.py", "--isolated", "--write-recipes", "recipes.toml")
    assert done.returncode == 1
    assert "odd.py:5: Odd: no plan: " in done.stdout
    draft = (tmp_path / "recipes.toml").read_text()
    assert "target = 'odd:Odd'" in draft and "#   tried: Odd()(blob=" in draft

    again = poolaudit(tmp_path, "leaktests", "odd.py", "--isolated", "--write-recipes", "recipes.toml")
    assert again.returncode == 2
    assert "recipes.toml: exists, and may hold your work" in again.stderr
    assert (tmp_path / "recipes.toml").read_text() == draft

    (tmp_path / "mine.toml").write_text(
        "[[recipe]]\ntarget = 'odd:Odd'\n"
        "feed = { blob = '{\"payload\": torch.randn(b, n, device=device)}' }\n"
        "[[recipe]]\ntarget = 'odd:Left'\nskip = 'nobody calls it'\n"
        "[[recipe]]\ntarget = 'odd:Gone'\n"
    )
    (tmp_path / "poolaudit.toml").write_text("recipes = 'mine.toml'\n")
    done = poolaudit(tmp_path, "leaktests", "odd.py", "--output", "generated")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Left: nothing to test: left out by its recipe: nobody calls it" in done.stdout
    assert "a recipe names odd:Gone, which is not there" in done.stderr
    text = (tmp_path / "generated" / "test_leaks_odd_Odd.py").read_text()
    assert '"blob": {"payload": torch.randn(b, n, device=device)}' in text
    assert "from its recipe" in text


@pytest.mark.slow
def test_what_no_backward_pass_survives_is_measured_without_one_or_has_no_plan(tmp_path: Path) -> None:
    (tmp_path / "final.py").write_text(
        "import torch\n\n\nclass Final(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n        return x * 2\n\n"
        "    @staticmethod\n    def backward(ctx, grad):\n        raise ValueError('no second time')\n\n\n"
        "def once(x: torch.Tensor) -> torch.Tensor:\n"
        "    return Final.apply(x) if torch.is_grad_enabled() else x\n\n\n"
        "def never(x: torch.Tensor) -> torch.Tensor:\n"
        "    if not torch.is_grad_enabled():\n        raise ValueError('asks for gradients')\n"
        "    return Final.apply(x)\n"
    )
    done = poolaudit(tmp_path, "leaktests", "final.py", "--isolated", "--verbose", "--output", "generated")
    assert "never: no plan: it ran once, but in no scenario: " in done.stdout, done.stdout + done.stderr
    text = (tmp_path / "generated" / "test_leaks_final_once.py").read_text()
    # Without gradients it does nothing: there is no operation that could fail.
    assert '"train"' not in text and "inject_faults" not in text
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "generated"], cwd=tmp_path, capture_output=True, check=False
    )
    assert run.returncode == 0, run.stdout.decode()[-2000:]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Missing argument 'PATH ...'"),
        (["nowhere.py"], "nowhere.py: no such file or directory"),
        (["."], None),
        ([".", "--recipes", "none.toml"], "none.toml: cannot be read"),
        ([".", "--timeout", "0"], "Invalid value for '--timeout'"),
    ],
)
def test_wrong_use_says_what_is_wrong(tmp_path: Path, arguments: list[str], said: str | None) -> None:
    done = poolaudit(tmp_path, "leaktests", *arguments, "--isolated")
    assert done.returncode == (2 if said else 0)
    assert (said or "Plans for nothing: no targets were found.") in done.stderr


def test_help_says_that_it_runs_code(tmp_path: Path) -> None:
    for command in ("leaktests", "gate"):
        done = poolaudit(tmp_path, command, "--help")
        assert done.returncode == 0
        assert "THIS RUNS THE CODE under PATH" in done.stdout


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with (
        pytest.raises(WorkshopError, match=r"torch is not installed: pip install 'poolaudit\[torch\]'"),
        workshop(),
    ):
        pass
    with pytest.raises(WorkshopError, match=r"pytest is not installed: pip install 'poolaudit\[pytest\]'"):
        need_pytest()
