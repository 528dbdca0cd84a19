"""The cache: what it keeps, what it notices, and what cannot hurt it."""

import errno
import multiprocessing
from pathlib import Path

import pytest

from auditor import cache as module
from auditor.cache import KEPT, Cache, fingerprint, tool_digest
from auditor.config import AnalysisSettings
from auditor.model import Failure


def test_keeps_an_answer_under_its_key(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c", ["."])
    assert not cache.has("run")
    cache.put("run", "key", Failure("a.py", 1, "no"))
    assert Cache(tmp_path / "c", ["."]).get("run", "key", Failure) == Failure("a.py", 1, "no")
    assert cache.has("run")
    assert cache.get("run", "other key", Failure) is None
    assert Cache(tmp_path / "c", ["elsewhere"]).get("run", "key", Failure) is None


def test_marks_itself_for_git_and_backups(tmp_path: Path) -> None:
    Cache(tmp_path / "c", ["."]).put("run", "key", 1)
    assert (tmp_path / "c" / ".gitignore").read_text() == "*\n"
    assert (
        (tmp_path / "c" / "CACHEDIR.TAG")
        .read_text()
        .startswith("Signature: 8a477f597d28d172789f06886806bc55")
    )


@pytest.mark.parametrize(
    "junk",
    [b"", b"{", b"null", b'{"key":"key","value":{"path":3}}', b"\xff\xfe", b"[" * 100_000, b'{"key":"key"}'],
)
def test_a_corrupted_entry_is_a_miss(tmp_path: Path, junk: bytes) -> None:
    cache = Cache(tmp_path / "c", ["."])
    cache.put("run", "key", Failure("a.py", 1, "no"))
    [file] = (tmp_path / "c").glob("*/run.json")
    file.write_bytes(junk)
    assert cache.get("run", "key", Failure) is None
    cache.put("run", "key", Failure("b.py", 1, "no"))
    assert cache.get("run", "key", Failure) == Failure("b.py", 1, "no")


def test_no_directory_remembers_nothing(tmp_path: Path) -> None:
    cache = Cache(None, ["."])
    cache.put("run", "key", 1)
    assert cache.get("run", "key", int) is None
    assert cache.warning is None


def test_a_full_disk_is_said_once_and_leaves_no_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path / "c", ["."])
    cache.put("run", "key", 1)

    def full(file: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_atomically", full)
    cache.put("scan", "key", 2)
    cache.put("flow", "key", 3)
    assert cache.warning == f"no cache: {tmp_path / 'c'}: No space left on device"
    assert Cache(tmp_path / "c", ["."]).get("run", "key", int) == 1
    assert not Cache(tmp_path / "c", ["."]).has("scan")


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("")
    cache = Cache(tmp_path / "c", ["."])
    cache.put("run", "key", 1)
    assert cache.warning is not None
    assert (tmp_path / "c").read_text() == ""


def test_old_sets_of_arguments_are_dropped(tmp_path: Path) -> None:
    for number in range(KEPT + 5):
        Cache(tmp_path / "c", [str(number)]).put("run", "key", number)
    assert len([entry for entry in (tmp_path / "c").iterdir() if entry.is_dir()]) == KEPT
    assert Cache(tmp_path / "c", [str(KEPT + 4)]).get("run", "key", int) == KEPT + 4


def hammer(directory: Path, number: int) -> None:
    for turn in range(100):
        cache = Cache(directory, [str(turn % 20)])
        cache.put("run", "key", [number] * 1000)
        value = cache.get("run", "key", list[int])
        assert value is None or (len(value) == 1000 and len(set(value)) == 1)


def test_two_runs_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=hammer, args=(tmp_path / "c", number)) for number in (1, 2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert not list((tmp_path / "c").rglob("*.tmp"))


def test_the_tool_digest_depends_on_settings_and_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tool_digest(AnalysisSettings())
    assert tool_digest(AnalysisSettings()) == base
    assert tool_digest(AnalysisSettings(exceptions="none")) != base
    monkeypatch.setattr(module, "__version__", "9.9")
    assert tool_digest(AnalysisSettings()) != base
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
