"""Codecs, newlines, links, pipes, folders named like files: what a real tree may hold."""

import codecs
import encodings.aliases
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.planted import LEAK, LEAK_LINE, PLANTED, audit, readable, run, tree_with_a_leak


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return tree_with_a_leak(tmp_path)


def _text_codecs() -> Iterator[str]:
    for name in sorted({*encodings.aliases.aliases.values(), "utf-8-sig", "idna", "punycode"}):
        try:
            if codecs.lookup(name)._is_text_encoding:
                yield name
        except LookupError:
            continue


def test_every_codec_as_python_reads_it(tree: Path) -> None:
    """A file in each codec that Python knows: what Python compiles is analysed, no other passed over."""
    own, written = {}, set()
    for codec in _text_codecs():
        try:
            source = f"# -*- coding: {codec} -*-\n{LEAK}".encode(codec)
        except UnicodeError:
            continue
        path = f"codec_{codec.replace('-', '_')}.py"
        (tree / path).write_bytes(source)
        written.add(path)
        if readable(source):
            own[path] = (path, 1 + LEAK_LINE, "PA101")
    assert len(own) > 50
    said = audit(tree)
    analysed = {path for path, _, _ in said.findings if path != "leaky.py"}
    assert {PLANTED, *own.values()} <= said.findings
    assert analysed | said.failed == written
    assert not analysed & said.failed


NOTHING = {
    "empty": b"",
    "blank lines": b"\n\n\n",
    "byte order mark only": b"\xef\xbb\xbf",
    "comment only": b"# pool.acquire",
    "no newline at the end": b"x = 1",
    "carriage returns": b"x = 1\ry = 2\r",
    "form feed": b"\x0cx = 1\n",
}


@pytest.mark.parametrize("name", NOTHING)
def test_files_with_little_in_them(tree: Path, name: str) -> None:
    (tree / "little.py").write_bytes(NOTHING[name])
    said = audit(tree)
    assert (said.status, said.findings, said.failed) == (1, {PLANTED}, set())


@pytest.mark.parametrize("newline", ["\r\n", "\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_newlines_and_byte_order_mark_keep_the_line(tmp_path: Path, newline: str, mark: bytes) -> None:
    (tmp_path / "leaky.py").write_bytes(mark + LEAK.replace("\n", newline).encode())
    assert audit(tmp_path).findings == {PLANTED}


def test_links_that_go_round(tree: Path) -> None:
    (tree / "inner").mkdir()
    (tree / "inner" / "up").symlink_to(tree, target_is_directory=True)
    (tree / "self.py").symlink_to("self.py")
    (tree / "nowhere.py").symlink_to("missing.py")
    said = audit(tree)
    assert PLANTED in said.findings
    assert {path for path, _, _ in said.findings} == {"leaky.py"}
    assert said.failed <= {"self.py", "nowhere.py"}


def test_a_directory_named_like_a_file(tree: Path) -> None:
    (tree / "x.py").mkdir()
    (tree / "x.py" / "inside.py").write_text(LEAK)
    said = audit(tree)
    assert (said.status, said.failed) == (1, set())
    assert said.findings == {PLANTED, ("x.py/inside.py", LEAK_LINE, "PA101")}


def test_a_pipe_named_like_a_file_is_not_waited_for(tree: Path) -> None:
    os.mkfifo(tree / "pipe.py")
    said = audit(tree)
    assert said.findings == {PLANTED}
    assert said.failed <= {"pipe.py"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_nobody_may_read(tree: Path) -> None:
    (tree / "secret.py").write_text(LEAK)
    (tree / "secret.py").chmod(0)
    said = audit(tree)
    assert (said.status, said.findings, said.failed) == (2, {PLANTED}, {"secret.py"})


def test_a_path_that_is_not_there_is_wrong_use(tree: Path) -> None:
    done = run(tree, "missing.py")
    assert done.status == 2
    assert "missing.py" in done.err
