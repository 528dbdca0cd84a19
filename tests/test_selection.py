"""Which rules run where."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from auditor import selection
from auditor.config import Settings
from auditor.model import Finding, Severity, Span
from auditor.rule import Meta, Rule
from auditor.selection import Selection
from auditor.settings_file import SettingsError


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rules, of which PA103 is off by default."""
    made = tuple(
        Rule(
            Meta(code, f"rule-{code}", Severity.ERROR, default=code != "PA103"),
            "",
            "",
            "",
            lambda facts: iter(()),
        )
        for code in ("PA001", "PA101", "PA103", "PA301")
    )
    monkeypatch.setattr(selection, "all_rules", lambda: made)


def codes(
    select: tuple[str, ...] | None = None, ignore: tuple[str, ...] = (), root: Path = Path("/p")
) -> list[str]:
    return sorted(Selection(Settings(select=select, ignore=ignore), root).codes)


def test_defaults_and_prefixes() -> None:
    assert codes() == ["PA001", "PA101", "PA301"]
    assert codes(("PA1",)) == ["PA101", "PA103"]
    assert codes(("ALL",)) == ["PA001", "PA101", "PA103", "PA301"]
    assert codes(("PA301", "PA0")) == ["PA001", "PA301"]
    assert codes(()) == []


def test_the_longer_prefix_wins_and_ignore_wins_a_tie() -> None:
    assert codes(("ALL",), ("PA1",)) == ["PA001", "PA301"]
    assert codes(("PA101",), ("PA1",)) == ["PA101"]
    assert codes(("PA1",), ("PA1",)) == []
    assert codes(None, ("PA3",)) == ["PA001", "PA101"]
    assert codes(None, ("ALL",)) == []


@pytest.mark.parametrize(
    ("code", "suggested"),
    [
        ("PA302", "did you mean `PA301`?"),
        ("pa101", "`PA101`?"),
        ("P", "known: PA001"),
        ("al", "`ALL`?"),
        ("", "known: "),
    ],
)
def test_unknown_codes(code: str, suggested: str) -> None:
    with pytest.raises(SettingsError) as caught:
        codes((code,))
    assert f"unknown rule code `{code}`" in str(caught.value)
    assert suggested in str(caught.value)


def test_unknown_codes_are_found_wherever_they_stand() -> None:
    with pytest.raises(SettingsError, match="PA999"):
        codes(None, ("PA999",))
    with pytest.raises(SettingsError, match="PA999"):
        Selection(Settings(per_file_ignores={"*.py": ("PA999",)}), Path("/p"))


def keeps(table: Mapping[str, tuple[str, ...]], path: str, root: Path, code: str = "PA101") -> bool:
    finding = Finding(code, "n", Severity.ERROR, Span(path, 1, 1, 1, 2), "", "")
    return Selection(Settings(per_file_ignores=table), root).keeps(finding)


def test_per_file_ignores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pkg").mkdir()
    monkeypatch.chdir(tmp_path / "pkg")
    table = {"tests/": ("PA1",), "*_pb2.py": ("ALL",), "/pkg/one.py": ("PA101",)}
    assert not keeps(table, "tests/deep/test_x.py", tmp_path)
    assert not keeps(table, "../tests/test_x.py", tmp_path)
    assert keeps(table, "tests/test_x.py", tmp_path, "PA301")
    assert not keeps(table, "deep/a_pb2.py", tmp_path, "PA301")
    assert not keeps(table, "one.py", tmp_path)
    assert keeps(table, "sub/one.py", tmp_path)
    assert keeps(table, "../../outside/tests/x.py", tmp_path)


def test_a_malformed_glob_is_bad_configuration(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"per-file-ignores: `!`"):
        keeps({"!": ("PA1",)}, "x.py", tmp_path)
