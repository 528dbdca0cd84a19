"""--diff-base: only what touches lines changed since a revision."""

import subprocess
from pathlib import Path

import pytest

from auditor.changed_lines import DiffError, changed_since
from auditor.model import Finding, Severity, Span, Step
from tests.command_line import places, poolaudit


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "-q")
    git(tmp_path, "config", "user.email", "a@example.com")
    git(tmp_path, "config", "user.name", "A")
    (tmp_path / "a.py").write_text("".join(f"line{n} = {n}\n" for n in range(1, 11)))
    (tmp_path / "dé pot.py").write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "start")
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)


def touched(base: str = "HEAD", path: str = "a.py", lines: int = 14, end: int | None = None) -> list[int]:
    changed = changed_since(base, Path.cwd())
    return [n for n in range(1, lines) if changed.touch(at(path, n))]


def at(path: str, line: int, end_line: int = 0, trace: tuple[Step, ...] = ()) -> Finding:
    return Finding("PA101", "n", Severity.ERROR, Span(path, line, 1, end_line or line, 2), "", "", trace)


def edit(file: Path, **lines: str) -> None:
    texts = file.read_text().splitlines(keepends=True)
    for name, text in lines.items():
        texts[int(name[1:]) - 1] = text
    file.write_text("".join(texts))


def test_changed_added_and_removed(repository: Path) -> None:
    edit(repository / "a.py", n3="changed\nadded\n", n6="", n9="++ looks like a header\n")
    assert touched() == [3, 4, 9]


def test_committed_changes_count_too(repository: Path) -> None:
    edit(repository / "a.py", n2="two\n")
    git(repository, "commit", "-qam", "second")
    edit(repository / "a.py", n5="five\n")
    assert touched("HEAD~1") == [2, 5]
    assert touched("HEAD") == [5]


def test_new_files_and_odd_names(repository: Path) -> None:
    (repository / "new.py").write_text("x\n")
    (repository / "dé pot.py").write_text("x = 1\ny = 2\n")
    assert touched(path="new.py", lines=3) == [1, 2]
    assert touched(path="dé pot.py", lines=3) == [2]
    assert touched(path="a.py") == []


def test_a_renamed_file_is_new(repository: Path) -> None:
    git(repository, "mv", "a.py", "b.py")
    assert touched(path="b.py", lines=12) == list(range(1, 11))


def test_spans_and_traces(repository: Path) -> None:
    edit(repository / "a.py", n5="five\n")
    changed = changed_since("HEAD", repository)
    assert changed.touch(at("a.py", 4, 6))
    assert changed.touch(at("a.py", 1, trace=(Step("a.py", 5, 1, "left"),)))
    assert not changed.touch(at("a.py", 1, trace=(Step("a.py", 6, 1, "left"),)))


def test_from_a_folder_below(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "sub").mkdir()
    edit(repository / "a.py", n5="five\n")
    monkeypatch.chdir(repository / "sub")
    assert [n for n in range(1, 9) if changed_since("HEAD", Path.cwd()).touch(at("../a.py", n))] == [5]


def test_errors(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DiffError, match="no such revision"):
        changed_since("nowhere", repository)
    with pytest.raises(DiffError):
        changed_since("--output=x", repository)
    with pytest.raises(DiffError, match="not a git repository"):
        changed_since("HEAD", tmp_path_factory.mktemp("plain"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DiffError, match="needs git"):
        changed_since("HEAD", repository)


def test_on_the_command_line(repository: Path) -> None:
    (repository / "a.py").write_text("x = 1  # poolaudit: ignore[PA101]\n")
    git(repository, "commit", "-qam", "old finding")
    (repository / "a.py").write_text("x = 1  # poolaudit: ignore[PA101]\ny = 1  # poolaudit: ignore[PA102]\n")
    done = poolaudit("audit", "--diff-base", "HEAD", "--format", "json", cwd=repository)
    assert (done.status, places(done.json)) == (1, [("a.py", 2, "PA002")])
    failed = poolaudit("audit", "--diff-base", "nowhere", cwd=repository)
    assert (failed.status, failed.out) == (2, "")
    assert "nowhere" in failed.err or "no such revision" in failed.err
