"""Hostile trees: named failures, status 2, no traceback, and the other files' findings complete."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from auditor.config import Settings
from auditor.engine import Request, audit
from auditor.flow.lease import StoredField
from auditor.model import Run
from auditor.project.analysis import Analysis
from auditor.project.fields.fields import Fields
from auditor.project.idle import losses
from auditor.project.leases.leases import Follower
from auditor.project.meaning.source import Source
from auditor.project.misuse.misused import Misused
from auditor.project.misuse.twice_by_methods import TwiceByMethods
from auditor.project.outcome import Outcome
from auditor.source import scan
from tests.command_line import UNUSED, places, poolaudit


def audited(folder: Path, monkeypatch: pytest.MonkeyPatch, cache: bool = False) -> Run:
    monkeypatch.chdir(folder)
    cache_dir = folder / ".poolaudit_cache" if cache else None
    return audit(Request((".",), Settings(), folder, jobs=2, cache_dir=cache_dir)).run


def codes(run: Run) -> list[tuple[str, int, str]]:
    return [(finding.span.path, finding.span.line, finding.code) for finding in run.findings]


def test_a_bad_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: dict[str, bytes] = {
        "empty.py": b"",
        "only_bom.py": b"\xef\xbb\xbf",
        "latin.py": b"# coding: latin-1\nx = '\xe9'\n",
        "crlf.py": b"x = 1\r\ny = 2\r\n",
        "bad_codec.py": b"# coding: nonsense\n",
        "bad_bytes.py": b"x = 1\ny = '\xff'\n",
        "null.py": b"x = 1\n\0\n",
        "surrogate.py": b"# coding: utf-7\nx = '+2AA-'\n",
        "utf16.py": "x = 1\n".encode("utf-16"),
        "syntax.py": b"x = 1\n\ndef f(:\n",
        "indent.py": b"if x:\n  a\n b\n",
        "parentheses.py": b"(" * 5000 + b")" * 5000,
        "blocks.py": b"".join(b" " * n + b"if x:\n" for n in range(1000)) + b" " * 1000 + b"pass\n",
        "good.py": UNUSED.encode(),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "gone.py").symlink_to("nowhere")
    (tmp_path / "self.py").symlink_to("self.py")
    (tmp_path / "loop").symlink_to(".")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "folder.py" / "inner.py").write_text(UNUSED)
    run = audited(tmp_path, monkeypatch)
    assert codes(run) == [("folder.py/inner.py", 1, "PA002"), ("good.py", 1, "PA002")]
    failed = {failure.path: (failure.line, failure.message) for failure in run.failures}
    assert set(failed) == {
        "bad_codec.py", "bad_bytes.py", "null.py", "utf16.py", "syntax.py", "indent.py", "parentheses.py",
        "blocks.py", "gone.py", "self.py", "surrogate.py",
    }  # fmt: skip
    assert {path: line for path, (line, _) in failed.items() if path not in ("gone.py", "self.py")} == {
        "bad_codec.py": 1, "bad_bytes.py": 2, "null.py": 2, "utf16.py": 1, "syntax.py": 3, "indent.py": 3,
        "parentheses.py": 1, "blocks.py": 101, "surrogate.py": 0,
    }  # fmt: skip
    assert failed["gone.py"] == (0, "cannot be read: No such file or directory")
    assert failed["self.py"] == (0, "cannot be read: Too many levels of symbolic links")
    assert run.summary.files == 17
    assert run.summary.files_failed == 11


def test_deep_and_long_but_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "sum.py": "x = " + " + ".join("1" for _ in range(3000)) + "\n",
        "chain.py": "x = a" + ".b()" * 3000 + "\n",
        "long.py": "x = 1\n" * 50_000,
        "elifs.py": "if a:\n    pass\n" + "elif b:\n    pass\n" * 3000,
        "minus.py": "x = " + "-" * 20_000 + "1\n",
        "lambdas.py": "x = " + "lambda: " * 5000 + "1\n",
        "good.py": UNUSED,
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    run = audited(tmp_path, monkeypatch)
    assert codes(run) == [("good.py", 1, "PA002")]
    assert not {"long.py", "good.py"} & {failure.path for failure in run.failures}
    assert all(failure.message for failure in run.failures)
    assert run.summary.lines >= 50_001


def test_a_file_that_kills_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        (tmp_path / f"m{number:02}.py").write_text(UNUSED)
    read = scan.read

    def deadly(file: scan.SourceFile) -> bytes:
        if file.path in ("m07.py", "m31.py"):
            os._exit(77)
        return read(file)

    monkeypatch.setattr(scan, "read", deadly)
    run = audited(tmp_path, monkeypatch, cache=True)
    assert [(failure.path, failure.message) for failure in run.failures] == [
        ("m07.py", "crashed the process that read it (exit code 77)"),
        ("m31.py", "crashed the process that read it (exit code 77)"),
    ]
    assert len(run.findings) == 38
    monkeypatch.setattr(scan, "read", read)
    assert len(audited(tmp_path, monkeypatch, cache=True).findings) == 40


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text(UNUSED)
    (tmp_path / "secret.py").write_text(UNUSED)
    opened = os.open

    def refusing(path: str, flags: int) -> int:
        if str(path).endswith("secret.py"):
            raise PermissionError(13, "Permission denied")
        return opened(path, flags)

    monkeypatch.setattr("auditor.source.load.os.open", refusing)
    run = audited(tmp_path, monkeypatch)
    assert codes(run) == [("a.py", 1, "PA002")]
    assert [(failure.path, failure.message) for failure in run.failures] == [
        ("secret.py", "cannot be read: Permission denied")
    ]


def test_a_fault_of_ours_in_one_file_is_named_and_costs_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text(UNUSED)
    (tmp_path / "b.py").write_text("x = 1\n")
    index_file = scan.index_file

    def broken(path: str, *arguments: object) -> object:
        return index_file(path, *arguments) if path == "a.py" else {}["lost"]  # type: ignore[arg-type]

    monkeypatch.setattr(scan, "index_file", broken)
    run = audited(tmp_path, monkeypatch)
    assert codes(run) == [("a.py", 1, "PA002")]
    [failure] = run.failures
    assert failure.path == "b.py"
    assert re.fullmatch(
        r"internal error: KeyError: 'lost' \(test_hostile_trees\.py:\d+; please report it\)", failure.message
    )


POOL = """
class Pool:
    def __init__(self):
        self.idle = [object() for _ in range(8)]

    def acquire(self):
        return self.idle.pop()

    def release(self, thing):
        self.idle.append(thing)
"""


def test_a_fault_of_ours_over_one_acquire_is_named_and_the_others_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pool.py").write_text(POOL)
    for name in "a", "b":
        user = f"from pool import Pool\n\n\ndef {name}(pool: Pool):\n    pool.acquire()\n"
        (tmp_path / f"{name}.py").write_text(user)
    follow = Follower.outcome

    def broken(self: Follower, call: ast.Call, source: Source | None = None) -> Outcome | None:
        return {}["lost"] if self.function.name == "a" else follow(self, call, source)  # type: ignore[no-any-return]

    monkeypatch.setattr(Follower, "outcome", broken)
    run = audited(tmp_path, monkeypatch)
    assert codes(run) == [("b.py", 5, "PA104")]
    assert [(f.path, f.line, f.message.partition(" (")[0]) for f in run.failures] == [
        ("a.py", 5, "internal error: KeyError: 'lost'")
    ]


def test_a_fault_of_ours_over_one_field_is_named_and_the_others_are_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pool.py").write_text(POOL)
    holder = "class {0}:\n    def open(self, pool: Pool):\n        self.{0} = pool.acquire()\n"
    for name in "a", "b":
        (tmp_path / f"{name}.py").write_text(f"from pool import Pool\n\n\n{holder.format(name)}")
    fields_of = Fields._fields_of

    def broken(self: Fields, outcome: Outcome) -> Iterator[StoredField]:
        return {}["lost"] if outcome.function.module.path == "a.py" else fields_of(self, outcome)  # type: ignore[no-any-return]

    monkeypatch.setattr(Fields, "_fields_of", broken)
    run = audited(tmp_path, monkeypatch)
    assert codes(run) == [("b.py", 6, "PA106")]
    assert [(f.path, f.line, f.message.partition(" (")[0]) for f in run.failures] == [
        ("a.py", 6, "internal error: KeyError: 'lost'")
    ]


@pytest.mark.parametrize(
    ("owner", "name", "place"),
    [
        (Analysis, "_follow_openers", "."),
        (Analysis, "_follow_out_of_tables", "."),
        (Misused, "_lease", "a.py"),
        (TwiceByMethods, "misuses", "."),
        (losses, "lost_idle", "pool.py"),
    ],
)
def test_a_fault_of_ours_in_one_search_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, place: str
) -> None:
    (tmp_path / "pool.py").write_text(POOL)
    user = "from pool import Pool\n\n\ndef use(pool: Pool):\n    thing = pool.acquire()\n    print(thing)\n"
    (tmp_path / "a.py").write_text(user)

    def broken(*_: object, **__: object) -> object:
        return {}["lost"]  # type: ignore[no-any-return]

    monkeypatch.setattr(owner, name, broken)
    run = audited(tmp_path, monkeypatch)
    assert codes(run) == [("a.py", 5, "PA101")]
    [failure] = run.failures
    assert (failure.path, failure.line) == (place, 0)
    assert "internal error: KeyError: 'lost'" in failure.message


def test_a_pipe_given_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    done = poolaudit("audit", "pipe.py", "--format", "json", cwd=tmp_path)
    assert done.status == 2
    assert done.json["failures"] == [{"path": "pipe.py", "line": 0, "message": "not a regular file"}]


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(UNUSED)
    (tmp_path / "blocked").write_text("")
    done = poolaudit("audit", "--cache-dir", "blocked/cache", "--format", "json", cwd=tmp_path)
    assert (done.status, places(done.json)) == (1, [("a.py", 1, "PA002")])
    assert done.err.count("warning: no cache") == 1


def test_warm_runs_notice_every_kind_of_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text(UNUSED)
    (tmp_path / "b.py").write_text("x = 1\n")

    def now() -> list[tuple[str, int, str]]:
        return codes(audited(tmp_path, monkeypatch, cache=True))

    assert now() == now() == [("a.py", 1, "PA002")]
    stat = (tmp_path / "b.py").stat()
    (tmp_path / "b.py").write_text("y = 1\n")
    (tmp_path / "a.py").write_text("\n" + UNUSED[1:])
    os.utime(tmp_path / "b.py", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert now() == []
    (tmp_path / "b.py").write_text(UNUSED)
    assert now() == [("b.py", 1, "PA002")]
    (tmp_path / "b.py").rename(tmp_path / "c.py")
    assert now() == [("c.py", 1, "PA002")]
    (tmp_path / "c.py").unlink()
    assert now() == []
