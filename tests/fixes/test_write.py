"""Files are written whole, or left as they are with the reason."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from auditor.fixes.document import Document
from auditor.fixes.write import Change, Written, write_all
from auditor.source.discover import SourceFile


def change(file: Path, after: bytes = b"a = 2\n", before: bytes | None = None) -> Change:
    was = file.read_bytes() if before is None else before
    name = file.name
    return Change(SourceFile(name, str(file)), Document(name, was), Document(name, after))


def source(folder: Path, name: str = "a.py", mode: int = 0o644) -> Path:
    file = folder / name
    file.write_bytes(b"a = 1\n")
    file.chmod(mode)
    return file


def test_mode_bits_stay(tmp_path: Path) -> None:
    file = source(tmp_path, mode=0o751)
    assert write_all([change(file)]) == Written(("a.py",), {})
    assert (file.read_bytes(), file.stat().st_mode & 0o7777) == (b"a = 2\n", 0o751)


def test_a_file_changed_meanwhile_is_left(tmp_path: Path) -> None:
    file = source(tmp_path)
    written = write_all([change(file, before=b"a = 0\n")])
    assert written == Written((), {"a.py": "has changed since it was analysed"})
    assert file.read_bytes() == b"a = 1\n"


def test_a_file_changed_while_others_are_written_is_left(tmp_path: Path) -> None:
    first, second = source(tmp_path, "a.py"), source(tmp_path, "b.py")

    def write(file: Path, data: bytes) -> None:
        file.write_bytes(data)
        second.write_bytes(b"mine = 1\n")

    written = write_all([change(first), change(second)], write=write)
    assert written == Written(("a.py",), {"b.py": "has changed since it was analysed"})
    assert second.read_bytes() == b"mine = 1\n"


def test_a_file_gone_meanwhile_is_not_made_again(tmp_path: Path) -> None:
    file = source(tmp_path)
    waiting = change(file)
    file.unlink()
    assert write_all([waiting]).refused == {"a.py": "is no longer there"}
    assert not file.exists()


def test_a_read_only_file_is_left(tmp_path: Path) -> None:
    file = source(tmp_path, mode=0o444)
    assert write_all([change(file)]) == Written((), {"a.py": "is read-only"})
    assert file.read_bytes() == b"a = 1\n"


def test_what_one_fix_changes_is_written_together_or_not(tmp_path: Path) -> None:
    good, bound, locked = source(tmp_path, "a.py"), source(tmp_path, "b.py"), source(tmp_path, "c.py", 0o444)
    written = write_all([change(good), change(bound), change(locked)], [("b.py", "c.py")])
    assert written == Written(("a.py",), {"b.py": "c.py is read-only", "c.py": "is read-only"})
    assert bound.read_bytes() == b"a = 1\n"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    file = source(tmp_path)
    link = tmp_path / "link.py"
    link.symlink_to(file)
    assert write_all([change(link)]).paths == ("link.py",)
    assert link.is_symlink()
    assert file.read_bytes() == b"a = 2\n"


def test_a_full_disk_is_said_and_the_others_are_written(tmp_path: Path) -> None:
    first, second = source(tmp_path, "a.py"), source(tmp_path, "b.py")

    def write(file: Path, data: bytes) -> None:
        if file.name == "a.py":
            raise OSError(28, "No space left on device")
        file.write_bytes(data)

    written = write_all([change(first), change(second)], write=write)
    assert written == Written(("b.py",), {"a.py": "cannot be written: No space left on device"})


KILLED = """
import os, sys
from pathlib import Path
from auditor.fixes.document import Document
from auditor.fixes.write import Change, write_all
from auditor.source.discover import SourceFile
print("ready", flush=True)
folder = Path(sys.argv[1])
old, new = b"a = 1\\n" * 200_000, b"b = 2\\n" * 300_000
while True:
    for before, after in ((old, new), (new, old)):
        write_all([
            Change(SourceFile(f.name, str(f)), Document(f.name, before), Document(f.name, after))
            for f in sorted(folder.glob("*.py"))
        ])
"""


def test_a_kill_at_any_moment_leaves_each_file_old_or_new(tmp_path: Path) -> None:
    old, new = b"a = 1\n" * 200_000, b"b = 2\n" * 300_000
    for name in ("a.py", "b.py", "c.py"):
        (tmp_path / name).write_bytes(old)
    for turn in range(12):
        for name in ("a.py", "b.py", "c.py"):
            (tmp_path / name).write_bytes(old)
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        try:
            process.wait(timeout=0.003 + 0.007 * turn)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        for name in ("a.py", "b.py", "c.py"):
            assert (tmp_path / name).read_bytes() in (old, new)
