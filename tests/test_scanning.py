"""Scanning many files at once, and following their leases meanwhile: one answer, whoever does what when."""

from pathlib import Path

import pytest

from auditor import scanning
from auditor.config import Settings
from auditor.engine import Request, audit
from auditor.model import Run
from auditor.progress import no_progress
from auditor.protocols.clues import clues
from auditor.protocols.load import in_force
from auditor.source.discover import discover
from auditor.texts import Texts

LEAKING = "from pools import POOL\n\n\ndef f():\n    b = POOL.acquire({n})\n    b.fill_(0)\n"
POOLS = """class BufferPool:
    def acquire(self, n): return self.free.pop()
    def release(self, b): self.free.append(b)


POOL = BufferPool()
"""
PLAIN = "def plain():\n    return {n}\n"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scanning, "MANY", 8)
    for n in range(8):
        (tmp_path / f"plain_{n}.py").write_text(PLAIN.format(n=n))
    for n in range(4):
        (tmp_path / f"leaking_{n}.py").write_text(LEAKING.format(n=n))
    (tmp_path / "pools.py").write_text(POOLS)
    return tmp_path


def scanned(tree: Path, jobs: int) -> scanning.Scan:
    settings = Settings().analysis
    texts = Texts(discover((".",), root=str(tree), exclude=()).files)
    return scanning.scan_all(texts, {}, clues(in_force(settings)), jobs, no_progress, settings)


def run(tree: Path, jobs: int, **more: object) -> Run:
    audited = audit(Request((".",), Settings(select=("ALL",)), tree, jobs=jobs, **more))  # type: ignore[arg-type]
    return audited.run


def same(one: Run, other: Run) -> bool:
    return (one.findings, one.failures, one.unfollowed, one.classes) == (
        other.findings,
        other.failures,
        other.unfollowed,
        other.classes,
    )


def test_a_worker_follows_the_leases_while_others_scan(tree: Path) -> None:
    ahead = scanned(tree, 2)
    assert ahead.flow is not None
    assert sum(bool(lease.leaks) for lease in ahead.flow.leases) == 4
    assert ahead.files == scanned(tree, 1).files
    assert scanned(tree, 1).flow is None
    found = run(tree, 2)
    assert [finding.code for finding in found.findings].count("PA101") == 4
    assert same(found, run(tree, 1))


def test_files_that_say_the_same_are_followed_each_for_itself(tree: Path) -> None:
    for n in range(3):
        (tree / f"same_{n}.py").write_text(POOLS + LEAKING.partition("\n")[2].format(n=8))
    found = run(tree, 2)
    assert [finding.code for finding in found.findings].count("PA101") == 7
    assert same(found, run(tree, 1))


def test_few_files_are_not_worth_it(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "MANY", 14)
    assert scanned(tree, 2).flow is None


def test_what_was_followed_with_a_file_that_cannot_be_read_is_followed_again(tree: Path) -> None:
    (tree / "leaking_9.py").write_text("def f(pool):\n    b = pool.acquire(8\n")
    assert scanned(tree, 2).flow is None
    found = run(tree, 2)
    assert [failure.path for failure in found.failures] == ["leaking_9.py"]
    assert [finding.code for finding in found.findings].count("PA101") == 4
    assert same(found, run(tree, 1))


def test_a_worker_that_dies_over_the_leases_costs_time_only(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = scanning.run_all

    def without_flow(work, items, jobs, first=()):  # type: ignore[no-untyped-def]
        for item, result in real(work, items, jobs, first):
            died = isinstance(item, scanning.FlowJob)
            yield item, scanning.Died(-11) if died else result

    monkeypatch.setattr(scanning, "run_all", without_flow)
    assert scanned(tree, 2).flow is None
    assert [finding.code for finding in run(tree, 2).findings].count("PA101") == 4


def test_the_cache_is_filled_as_by_one_process(tree: Path) -> None:
    cached = tree / ".cache"
    first = run(tree, 2, cache_dir=cached)
    (tree / "plain_1.py").write_text(PLAIN.format(n=100))
    assert same(run(tree, 2, cache_dir=cached), first)
