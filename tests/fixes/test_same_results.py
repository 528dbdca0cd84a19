"""`--verify` holds old code against new: the same inputs through both, outputs and gradients to the bit."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import auditor.judge
from auditor.case import Case
from auditor.cli.fix_run import FixOptions, run_fix
from auditor.leaktests.generate import Order, generate
from auditor.leaktests.plan import Plan
from auditor.leaktests.sameness import Versions, changed_results
from auditor.leaktests.workshop import workshop
from auditor.model import FixOffer
from auditor.rule import Rule, all_rules
from auditor.source.discover import SourceFile

pytestmark = pytest.mark.slow

MODULE = """\
import os

import torch
from torch import nn


class Scores(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.proj(x)
        return y.relu()


def scaled(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return x * factor
"""


REWRITTEN = {
    "the same in other words": (
        "        return y.relu()\n",
        "        try:\n            return y.relu()\n        finally:\n            del y\n",
    ),
    "last bits": ("y.relu()", "y.relu() * 1.0000002"),
    "sign of zero": ("y.relu()", "torch.where(y > 0, y, torch.full_like(y, -0.0))"),
    "gradients alone": ("y.relu()", "y.relu() + (x - x.detach())"),
    "another form": ("y.relu()", "(y.relu(), None)"),
    "another dtype": ("y.relu()", "y.relu().double()"),
    "evaluation alone": ("y.relu()", "y.relu() if self.training else y.relu() + 1"),
    "a shape refused": ("y.relu()", "y.relu() if x.shape[1] > 1 else 1 / 0"),
    "random numbers": ("y = self.proj(x)", "torch.rand(1)\n        y = self.proj(x)"),
    "parameters": ("nn.Linear(dim, dim)", "nn.Linear(dim, dim, bias=False)"),
    "its input": ("x * factor", "x * factor if x.requires_grad else x.mul_(factor)"),
    "the end of the process": ("y.relu()", "os._exit(3)"),
    "no import": ("import os", "import os.nowhere"),
}
RESTLESS = MODULE.replace("y.relu()", "y.relu() + int.from_bytes(os.urandom(4), 'little')")


@pytest.fixture(scope="module")
def reasons(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """What is said of each rewriting, by its title; all of them in one tree."""
    folder = tmp_path_factory.mktemp("versions")
    texts = {f"case_{n}.py": (MODULE, MODULE.replace(*pair)) for n, pair in enumerate(REWRITTEN.values())}
    texts["restless.py"] = (RESTLESS, RESTLESS.replace("return", "return ", 1))
    for name, (before, after) in texts.items():
        for version, text in (("before", before), ("after", after)):
            (folder / version).mkdir(exist_ok=True)
            (folder / version / name).write_text(text)
    files = [SourceFile(name, os.fspath(folder / "before" / name)) for name in texts]
    with workshop() as shop:
        plans = generate(Order(files, (), folder / "tests"), shop).planned.plans
        found = changed_results(
            [in_folder(plan, folder / "after") for plan in plans],
            Versions(folder / "before", folder / "after"),
            shop,
        )
    titles = {f"case_{n}.py": title for n, title in enumerate(REWRITTEN)} | {"restless.py": "restless"}
    assert {plan.target.path for plan in plans} == set(titles)
    return {title: found.get(name, "") for name, title in titles.items()}


def in_folder(plan: Plan, folder: Path) -> Plan:
    target = msgspec.structs.replace(plan.target, root=os.fspath(folder))
    return msgspec.structs.replace(plan, target=target)


def test_the_same_code_in_other_words_passes(reasons: Mapping[str, str]) -> None:
    assert reasons["the same in other words"] == ""


@pytest.mark.parametrize(
    "title, reason",
    [
        ("last bits", "Scores, training at (2, 32): output 0 differs in"),
        ("sign of zero", "Scores, training at (2, 32): output 0 differs in the sign of a zero"),
        ("gradients alone", "Scores, training at (2, 32): gradient of input 0 differs in"),
        (
            "another form",
            "Scores, training at (2, 32): the form of the output: tensor before, tuple(tensor, None)",
        ),
        ("another dtype", "Scores, training at (2, 32): output 0 is torch.float32 (2, 32, 64) before"),
        ("evaluation alone", "Scores, evaluation at (2, 32): output 0 differs in"),
        (
            "a shape refused",
            "Scores, training at (2, 1): output 0: a tensor of (2, 1, 64) before, nothing after",
        ),
        ("random numbers", "Scores, training at (2, 32): random numbers afterwards differs in 4 of 4 values"),
        ("parameters", "Scores, training: proj.bias as built: a tensor of (64,) before, nothing after"),
        ("its input", "scaled, evaluation at (2, 32): input 0 afterwards differs in"),
        ("the end of the process", "Scores, it ended the interpreter while it was tried (status 3)"),
        ("no import", "Scores, training: proj.weight as built: a tensor of (64, 64) before, nothing after"),
    ],
)
def test_a_difference_is_named(reasons: Mapping[str, str], title: str, reason: str) -> None:
    assert reasons[title].startswith(f"its results change: {reason}")


def test_results_that_come_and_go_prove_nothing(reasons: Mapping[str, str]) -> None:
    start = "nothing can be said of its results, which change by themselves: Scores, "
    assert reasons["restless"].startswith(start)


POOLED = """\
import torch
from torch import nn


class TensorPool:
    def __init__(self):
        self.free = []
        self.lent = 0

    def allocate(self, shape):
        self.lent += 1
        return self.free.pop() if self.free else torch.zeros(shape)

    def deallocate(self, tensor):
        self.lent -= 1
        self.free.append(tensor)


class Scores(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.proj = nn.Linear(dim, dim)
        self.pool = TensorPool()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts = self.pool.allocate((4,))
        y = self.proj(x)
        self.pool.deallocate(counts)
        return y
"""


def rules_that(change: Callable[[FixOffer], FixOffer]) -> tuple[Rule, ...]:
    """All rules, with what their fixes offer changed."""

    def spoilt(rule: Rule) -> Rule:
        def fix(case: Case) -> FixOffer | None:
            offer = rule.fix(case) if rule.fix else None
            return change(offer) if offer else None

        return replace(rule, fix=fix) if rule.fix else rule

    return tuple(map(spoilt, all_rules()))


def options(**given: object) -> FixOptions:
    plain: dict[str, object] = dict.fromkeys(FixOptions.__dataclass_fields__, False)
    nothing = dict.fromkeys(("exceptions", "baseline", "diff_base", "jobs", "cache_dir", "config"))
    return FixOptions(**plain | nothing | {"select": (), "ignore": ()} | given)  # type: ignore[arg-type]


@pytest.mark.parametrize("factor, status", [("", 0), (" * 1.5", 1)])
def test_a_broken_fix_builder_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    factor: str,
    status: int,
) -> None:
    """It repairs what it says, so the analysis is content; that it changes numbers shows when it runs."""
    (tmp_path / "model.py").write_text(POOLED)
    monkeypatch.chdir(tmp_path)

    def broken(offer: FixOffer) -> FixOffer:
        edits = (
            replace(e, replacement=e.replacement.replace("proj(x)", f"proj(x){factor}")) for e in offer.edits
        )
        return replace(offer, edits=tuple(edits))

    monkeypatch.setattr(auditor.judge, "all_rules", lambda: rules_that(broken))
    chosen = options(paths=("model.py",), verify=True, unsafe_fixes=True, isolated=True, no_cache=True)
    assert run_fix(replace(chosen, select=("PA103",), no_progress=True)) == status
    said = " ".join(capsys.readouterr().err.split())
    if status:
        assert (tmp_path / "model.py").read_text() == POOLED
        assert (
            "not written: model.py its results change: Scores, training at (2, 32): output 0 differs" in said
        )
    else:
        assert "finally:\n            self.pool.deallocate(counts)" in (tmp_path / "model.py").read_text()
