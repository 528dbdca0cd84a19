"""`poolaudit gate`: one verdict, findings proven by tests, JUnit, and what audit then repeats."""

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from auditor.leaktests.plan import Variation
from auditor.leaktests.proofs import read_proofs, with_proofs, write_proofs
from auditor.leaktests.running import Case
from auditor.leaktests.verdicts import _said
from auditor.model import Finding, Severity, Span
from tests.leaktests.test_cli_leaktests import poolaudit

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "longdoc"
POOL = """\
import torch


class TensorPool:
    def __init__(self):
        self.idle = []
        self.out = {}

    def allocate(self, shape):
        tensor = self.idle.pop() if self.idle else torch.empty(shape)
        self.out[id(tensor)] = tensor
        return tensor

    def deallocate(self, tensor):
        del self.out[id(tensor)]
        self.idle.append(tensor)
"""
MODULE = """\
import torch
from torch import nn

from kit.pool import TensorPool


class Doubler(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool = TensorPool()

    def forward(self, x: torch.Tensor, early: bool = False) -> torch.Tensor:
        scratch = self.pool.allocate((4, 4))
        try:
            if early:
                {early}
            return x * 2
        finally:
            {finally_}
"""
GOOD = MODULE.format(early="return x * 3", finally_="self.pool.deallocate(scratch)")
LEAKY = MODULE.replace(
    "        try:\n", "        if early:\n            return x * 3\n        try:\n"
).format(early="pass", finally_="self.pool.deallocate(scratch)")
LEAK_LINE = 13


def project(folder: Path, module: str) -> Path:
    (folder / "kit").mkdir()
    (folder / "kit" / "__init__.py").write_text("")
    (folder / "kit" / "pool.py").write_text(POOL)
    (folder / "kit" / "doubler.py").write_text(module)
    (folder / "poolaudit.toml").write_text("")
    return folder


@pytest.mark.slow
def test_a_leak_on_a_flag_is_confirmed_and_later_audits_say_so(tmp_path: Path) -> None:
    project(tmp_path, LEAKY)
    done = poolaudit(
        tmp_path, "gate", "--device", "cpu", "--output", "junit=gate.xml", "--output", "json=gate.json"
    )
    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "gate.json").read_text())["findings"]
    assert [(f["code"], f["path"], f["line"], f["proof"]) for f in found] == [
        ("PA102", "kit/doubler.py", LEAK_LINE, "confirmed")
    ]
    assert "gate: audit      FAILED  1 finding (1 confirmed by a test)" in done.stderr
    assert "gate: fixes      FAILED  1 safe to apply: poolaudit fix" in done.stderr
    assert "gate: plans      passed  1 of 1 modules and autograd functions have one" in done.stderr
    assert "gate: leak tests FAILED" in done.stderr
    assert "gate: verdict: not good" in done.stderr

    root = ElementTree.parse(tmp_path / "gate.xml").getroot()
    suites = ["poolaudit", "fixes", "test_leaks_kit_doubler_Doubler", "plans"]
    assert [suite.get("name") for suite in root] == suites
    failed = [
        case.get("name") for case in root.iterfind("testsuite/testcase") if case.find("failure") is not None
    ]
    starts = ("PA102 early-exit-leak", "PA102 kit/doubler.py:13", "test_PA102_doubler_line_13_")
    assert [str(name)[: len(start)] for name, start in zip(failed, starts, strict=True)] == list(starts)
    assert root.get("failures") == "3"

    audit = poolaudit(tmp_path, "audit", "--format", "json", "--no-cache")
    assert [f["proof"] for f in json.loads(audit.stdout)["findings"]] == ["confirmed"]
    with (tmp_path / "kit" / "doubler.py").open("a") as file:
        file.write("# changed\n")
    audit = poolaudit(tmp_path, "audit", "--format", "json", "--no-cache")
    assert [f["proof"] for f in json.loads(audit.stdout)["findings"]] == ["not_run"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_leaks_of_the_example_are_confirmed(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "longdoc", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "poolaudit.toml").write_text("")
    arguments = ("gate", "longdoc", "--device", "cpu", "--output", "json=gate.json", "--no-progress")
    done = poolaudit(tmp_path, *arguments, timeout=850)
    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "gate.json").read_text())["findings"]
    proofs = {f["code"]: f["proof"] for f in found if f["code"].startswith("PA1")}
    assert len(proofs) == 10 and set(proofs.values()) == {"confirmed"}, proofs
    assert len(proofs) == 10
    assert "gate: plans      passed  8 of 8 modules and autograd functions have one" in done.stderr
    failed = [line for line in done.stderr.splitlines() if line.endswith((": failed", ": error"))]
    clean = ("BlockSparseAttention", "WindowAttention", "DilatedAttention", "merge", "borrow_", "pairwise_")
    assert not [line for line in failed if any(name in line.split()[0] for name in clean)]


@pytest.mark.slow
def test_a_clean_tree_passes(tmp_path: Path) -> None:
    project(tmp_path, GOOD)
    done = poolaudit(tmp_path, "gate", "--device", "cpu", "--quiet")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "gate: verdict: good"
    shown = [file.name for file in tmp_path.iterdir() if not file.name.startswith(".")]
    assert sorted(shown) == ["kit", "poolaudit.toml"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--device", "tpu"], "'tpu' is not one of"), (["nowhere"], "nowhere: no such file or directory")],
)
def test_wrong_use(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = poolaudit(tmp_path, "gate", *arguments, "--isolated")
    assert done.returncode == 2
    assert said in done.stderr


def test_a_cuda_that_is_not_there_is_said(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    done = poolaudit(tmp_path, "gate", ".", "--isolated", "--device", "cuda")
    assert done.returncode == 2
    assert "--device cuda: torch sees no CUDA device here; use --device cpu or auto" in done.stderr


def finding(path: Path, code: str = "PA101", fingerprint: str = "f1") -> Finding:
    return Finding(code, "n", Severity.ERROR, Span(str(path), 3, 1, 3, 2), "f", "m", fingerprint=fingerprint)


def test_proofs_hold_as_long_as_the_file_does(tmp_path: Path) -> None:
    source, store = tmp_path / "a.py", tmp_path / "proofs.json"
    source.write_text("x = 1\n")
    findings = [finding(source), finding(source, "PA301", "f2"), finding(source, "PA102", "f3")]
    assert [f.proof for f in with_proofs(findings, store)] == [None, None, None]
    write_proofs(store, "cpu", {"f1": "confirmed"}, findings)
    assert [f.proof for f in with_proofs(findings, store)] == ["confirmed", None, "not_run"]
    source.write_text("x = 2\n")
    assert [f.proof for f in with_proofs(findings, store)] == ["not_run", None, "not_run"]


@pytest.mark.parametrize("text", ["", "{", '{"version": 2, "device": "cpu", "findings": {}}', "[1]"])
def test_proofs_that_say_nothing_are_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "proofs.json"
    file.write_text(text)
    assert read_proofs(file) is None


VARIATION = Variation("abcdef", "PA102", "src/pkg/a.py:7", "m", (), (), (2, 32))
LEAK = "leak_support.errors.Leak: 1 lease not given back\n  1 a step, borrowed at {}"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (Case("test_PA102_a_line_7_abcdef", "passed"), "not_reproduced"),
        (Case("test_PA102_a_line_7_abcdef", "failed", 0, LEAK.format("src/pkg/a.py:7 in f")), "confirmed"),
        (Case("test_PA102_a_line_7_abcdef", "failed", 0, LEAK.format("/x/pkg/a.py:7 in f")), "confirmed"),
        (Case("test_PA102_a_line_7_abcdef", "failed", 0, LEAK.format("pkg/a.py:77 in f")), "not_reproduced"),
        (Case("test_PA102_a_line_7_abcdef", "failed", 0, LEAK.format("other/a.py:7 in f")), "not_reproduced"),
        (Case("test_PA102_a_line_7_abcdef", "failed", 0, "TypeError: no"), "not_run"),
        (Case("test_PA102_a_line_7_abcdef", "error"), "not_run"),
        (Case("test_memory_stays_level", "passed"), "not_run"),
    ],
)
def test_only_a_leak_at_the_findings_own_line_confirms_it(case: Case, said: str) -> None:
    assert _said(VARIATION, [case]) == said
