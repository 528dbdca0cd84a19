"""The engine: every rule through the whole pipeline, and what a second run computes again."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from auditor import examine
from auditor.config import Settings
from auditor.engine import Audited, Request, audit
from auditor.project import analysis
from auditor.rule import Rule, all_rules
from auditor.settings_file import SettingsError
from tests.command_line import UNUSED

LEAKING = "def f(pool):\n    b = pool.acquire(8)\n    b.fill_(0)\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def audited(*paths: str, select: tuple[str, ...] = ("ALL",), cache: str | None = None) -> Audited:
    here = Path.cwd()
    return audit(
        Request(paths or (".",), Settings(select=select), here, cache_dir=here / cache if cache else None)
    )


def codes_in(source: str) -> set[str]:
    Path("example.py").write_text(source)
    run = audited("example.py").run
    assert run.failures == ()
    return {finding.code for finding in run.findings}


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.meta.code)
def test_bad_fires_and_good_does_not(rule: Rule) -> None:
    assert rule.meta.code in codes_in(rule.bad)
    assert rule.meta.code not in codes_in(rule.good)


def test_a_comment_silences_a_finding_and_is_then_used() -> None:
    assert codes_in(LEAKING) == {"PA101"}
    assert codes_in(LEAKING.replace("(8)", "(8)  # poolaudit: ignore[PA101]")) == set()
    assert codes_in(LEAKING.replace("(8)", "(8)  # poolaudit: ignore[PA1]")) == set()
    assert codes_in(LEAKING.replace("(8)", "(8)  # poolaudit: ignore")) == {"PA001"}
    assert codes_in(LEAKING.replace("(8)", "(8)  # poolaudit: ignore[PA102]")) == {"PA101", "PA002"}
    assert codes_in(LEAKING.replace("    b =", "    # poolaudit: ignore[PA101]\n    b =")) == set()


def test_whether_a_comment_is_used_does_not_depend_on_the_selection() -> None:
    Path("a.py").write_text(LEAKING.replace("(8)", "(8)  # poolaudit: ignore[PA101]"))
    assert audited(select=("PA0",)).run.findings == ()


def test_findings_are_complete() -> None:
    Path("a.py").write_text("\n\n" + LEAKING)
    [finding] = audited().run.findings
    assert (finding.span.line, finding.symbol, len(finding.fingerprint)) == (4, "f", 16)
    excerpts = audited().run.excerpts["a.py"]
    assert excerpts[4] == "    b = pool.acquire(8)"
    assert set(range(2, 6)) <= set(excerpts)
    assert audited().run.summary.findings == {"PA101": 1}


def test_unknown_codes_are_refused_before_anything_is_read() -> None:
    with pytest.raises(SettingsError):
        audited(select=("PA99",))


def test_the_selection_does_not_spoil_the_cache() -> None:
    Path("a.py").write_text(LEAKING)
    assert audited(select=("PA3",), cache="c").run.findings == ()
    assert len(audited(select=("PA1",), cache="c").run.findings) == 1


def test_an_unchanged_tree_is_not_examined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.py").write_text(LEAKING)
    first = audited(cache="c").run
    monkeypatch.setattr(examine, "examine", _must_not_run)
    assert audited(cache="c").run.findings == first.findings


def test_a_file_without_pools_does_not_start_the_flow_analysis_again(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.py").write_text(LEAKING)
    Path("b.py").write_text("x = 1\n")
    first = audited(cache="c").run
    Path("b.py").write_text(UNUSED)
    with monkeypatch.context() as patch:
        patch.setattr(analysis, "analyse", _must_not_run)
        second = audited(cache="c").run
    assert [finding.code for finding in second.findings] == ["PA101", "PA002"]
    assert second.findings[0] == first.findings[0]
    Path("a.py").write_text("\n" + LEAKING)
    assert audited(cache="c").run.findings[0].span.line == 3


def _must_not_run(*arguments: object) -> object:
    raise AssertionError("this was to come from the cache")


def test_a_file_that_cannot_be_searched_costs_that_file_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever in it is nested beyond what the search can follow."""
    Path("deep.py").write_text("class Pool:\n    def acquire(self): ...\n    def release(self, x): ...\n")
    Path("plain.py").write_text(LEAKING)
    search = analysis.discover

    def searched(model: object, module: object) -> object:
        if getattr(module, "path", "") == "deep.py":
            raise RecursionError
        return search(model, module)  # type: ignore[arg-type]

    monkeypatch.setattr(analysis, "discover", searched)
    run = audited().run
    assert [(failure.path, failure.message) for failure in run.failures] == [
        ("deep.py", "not searched for pools: nested too deeply")
    ]
    assert {finding.span.path for finding in run.findings} == {"plain.py"}
