"""Discovery: which files, each once, in one order."""

import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from auditor.model import Failure
from auditor.source.discover import NoSuchPath, discover

Tree = Callable[..., None]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.chdir(tmp_path)

    def make(*paths: str) -> None:
        for path in paths:
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("")

    return make


def found(*arguments: str, exclude: tuple[str, ...] = ()) -> list[str]:
    discovered = discover(arguments or (".",), root=str(Path.cwd()), exclude=exclude)
    assert discovered.failures == ()
    return [file.path for file in discovered.files]


def ignore(path: str, *lines: str) -> None:
    Path(path).write_text("\n".join(lines) + "\n")


def test_python_files_and_stubs_only(tree: Tree) -> None:
    tree("a.py", "b.pyi", "c.txt", "d.ipynb", "sub/e.py", "f.pyc")
    assert found() == ["a.py", "b.pyi", "sub/e.py"]


def test_default_excludes(tree: Tree) -> None:
    tree("a.py", ".git/x.py", ".venv/x.py", "build/x.py", "sub/dist/x.py", "__pycache__/x.py", "builder/y.py")
    assert found() == ["a.py", "builder/y.py"]


def test_own_excludes_are_relative_to_the_root(tree: Tree) -> None:
    tree("a.py", "gen/x.py", "sub/gen/x.py", "sub/skip_1.py")
    assert found(exclude=("/gen/", "skip_*.py")) == ["a.py", "sub/gen/x.py"]
    assert found("sub", exclude=("/sub/gen",)) == ["sub/skip_1.py"]


def test_gitignore_nested_and_negated(tree: Tree) -> None:
    tree(
        "a.py",
        "b_pb2.py",
        "keep_pb2.py",
        "sub/c_pb2.py",
        "sub/d.py",
        "sub/deep/d.py",
        "logs/x.py",
        "logs/y.py",
    )
    ignore(".gitignore", "*_pb2.py", "!keep_pb2.py", "logs/", "!logs/x.py")
    ignore("sub/.gitignore", "!c_pb2.py", "/d.py")
    assert found() == ["a.py", "keep_pb2.py", "sub/c_pb2.py", "sub/deep/d.py"]


def test_gitignore_of_the_repository_reaches_down(tree: Tree) -> None:
    tree("pkg/a.py", "pkg/b_pb2.py", ".git/HEAD")
    ignore(".gitignore", "*_pb2.py")
    assert found("pkg") == ["pkg/a.py"]


def test_a_malformed_pattern_costs_itself_only(tree: Tree) -> None:
    tree("a.py", "b.py")
    ignore(".gitignore", "!", "b.py")
    assert found() == ["a.py"]


def test_agrees_with_git(tree: Tree, tmp_path: Path) -> None:
    """The files that git itself would list, for a tree with every kind of pattern."""
    names = [f"{d}{f}.py" for d in ("", "a/", "a/b/", "c/", "c/b/") for f in ("x", "y", "x_gen", "z1", "z2")]
    tree(*names)
    ignore(".gitignore", "*_gen.py", "/x.py", "a/**/y.py", "c/b/", "z[2-9].py", "!a/b/x_gen.py", "# no", "")
    ignore("a/.gitignore", "!x_gen.py", "b/z1.py", r"\!odd.py")
    ignore("c/.gitignore", "*", "!y.py")
    subprocess.run(["git", "init", "-q"], check=True, cwd=tmp_path)
    listed = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard", "*.py"],
        check=True,
        cwd=tmp_path,
        capture_output=True,
    )
    assert found() == sorted(listed.stdout.decode().split())


def test_whoever_names_a_path_wants_it(tree: Tree) -> None:
    tree("build/x.py", "gen/y.py", "gen/sub/y.py", "plain.txt", ".git/HEAD")
    ignore(".gitignore", "gen/")
    assert found("build/x.py", "gen/y.py", "plain.txt") == ["build/x.py", "gen/y.py", "plain.txt"]
    assert found("gen") == ["gen/sub/y.py", "gen/y.py"]
    assert found("gen/sub") == ["gen/sub/y.py"]
    assert found("build") == ["build/x.py"]


def test_order_and_repetition_of_arguments_do_not_matter(tree: Tree) -> None:
    tree("a.py", "sub/b.py", "sub/c.py")
    arguments = ["sub", "a.py", ".", "./sub/b.py", "sub/../a.py", "sub"]
    for seed in range(5):
        random.Random(seed).shuffle(arguments)
        assert found(*arguments) == ["a.py", "sub/b.py", "sub/c.py"]


def test_links(tree: Tree, tmp_path: Path) -> None:
    tree("real/a.py", "other/b.py")
    (tmp_path / "real" / "loop").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "again.py").symlink_to(tmp_path / "real" / "a.py")
    (tmp_path / "real" / "outside.py").symlink_to(tmp_path / "other" / "b.py")
    assert found("real") == ["real/a.py", "real/outside.py"]
    assert found(".") == ["other/b.py", "real/a.py"]
    assert found("real/loop/loop") == ["real/loop/loop/a.py", "real/loop/loop/outside.py"]
    assert found("real", "real/loop") == ["real/a.py", "real/outside.py"]


def test_links_to_nowhere_and_to_themselves_are_found_so_that_reading_fails(
    tree: Tree, tmp_path: Path
) -> None:
    tree("a.py")
    (tmp_path / "gone.py").symlink_to("nowhere.py")
    (tmp_path / "self.py").symlink_to("self.py")
    assert found() == ["a.py", "gone.py", "self.py"]
    assert found("self.py") == ["self.py"]


def test_folder_and_pipe_called_x_py(tree: Tree, tmp_path: Path) -> None:
    tree("x.py/inner.py")
    os.mkfifo(tmp_path / "pipe.py")
    assert found() == ["x.py/inner.py"]
    assert found("x.py") == ["x.py/inner.py"]


def test_missing_path(tree: Tree) -> None:
    with pytest.raises(NoSuchPath, match=r"^nowhere: no such file or directory$"):
        discover(["nowhere"], root=str(Path.cwd()))


def test_a_folder_that_cannot_be_listed_is_a_failure(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree("a.py", "secret/b.py")
    scandir = os.scandir

    def refusing(path: str) -> object:
        if path.endswith("secret"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    discovered = discover(["."], root=str(Path.cwd()))
    assert [file.path for file in discovered.files] == ["a.py"]
    assert discovered.failures == (Failure("secret", 0, "cannot be listed: Permission denied"),)


def test_names_that_are_not_utf8(tree: Tree, tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.py")).write_text("")
    assert found() == ["caf?.py"]


def test_paths_outside_the_working_directory(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree("a.py", "sub/b.py")
    monkeypatch.chdir(tmp_path / "sub")
    assert found("..") == ["../a.py", "b.py"]
