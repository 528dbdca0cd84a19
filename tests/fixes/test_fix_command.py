"""`poolaudit fix` as a user meets it."""

import contextlib
import hashlib
import subprocess
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import auditor.judge
from auditor.case import Case
from auditor.cli.fix_command import command
from auditor.git_state import uncommitted
from auditor.model import FixOffer
from tests.command_line import Done, poolaudit

LEAK = """\
def attend(pool, q):
    scores = pool.allocate(q.shape)
    scores.copy_(q)
    return scores.sum()
"""
FIXED = """\
def attend(pool, q):
    scores = pool.allocate(q.shape)
    try:
        scores.copy_(q)
        return scores.sum()
    finally:
        pool.deallocate(scores)
"""
UNSAFE = """\
class Cache:
    def __init__(self, pool, shape):
        self.pool = pool
        self.keys = pool.allocate(shape)
"""
DIFF = """\
--- a/leak.py
+++ b/leak.py
@@ -1,4 +1,7 @@
 def attend(pool, q):
     scores = pool.allocate(q.shape)
-    scores.copy_(q)
-    return scores.sum()
+    try:
+        scores.copy_(q)
+        return scores.sum()
+    finally:
+        pool.deallocate(scores)
"""


def fix(folder: Path, *arguments: str, stdin: str = "") -> Done:
    """The command in this process: two seconds less than one of its own."""
    runner = CliRunner(env={"COLUMNS": "80"})
    with contextlib.chdir(folder):
        options = [*arguments, "--isolated", "--no-cache", "--jobs", "1"]
        done = runner.invoke(command, options, input=stdin, standalone_mode=False)
    if isinstance(done.exception, click.UsageError):
        return Done(2, done.stdout, done.stderr + done.exception.format_message())
    if done.exception is not None:
        raise done.exception
    return Done(done.return_value, done.stdout_bytes.decode(), done.stderr)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "leak.py").write_text(LEAK)
    (tmp_path / "cache.py").write_text(UNSAFE)
    return tmp_path


def test_safe_fixes_are_written_and_the_rest_is_said(tree: Path) -> None:
    done = fix(tree)
    assert (done.status, done.out) == (0, "")
    assert (tree / "leak.py").read_text() == FIXED
    assert (tree / "cache.py").read_text() == UNSAFE
    assert done.err == (
        "Fixed     leak.py:2: PA101 never-released\n"
        "          try/finally around the life of `scores`\n"
        "Left      cache.py:4: PA106 field-never-released\n"
        "          its fix may change the program's meaning (--unsafe-fixes)\n"
        "Fixed 1 finding in 1 file; 1 left: 1 with --unsafe-fixes.\n"
    )


def test_a_second_run_changes_nothing(tree: Path) -> None:
    fix(tree, "--unsafe-fixes")
    before = [(file.read_bytes(), file.stat().st_mtime_ns) for file in sorted(tree.glob("*.py"))]
    done = fix(tree, "--unsafe-fixes")
    assert [(file.read_bytes(), file.stat().st_mtime_ns) for file in sorted(tree.glob("*.py"))] == before
    assert (done.status, done.err) == (0, "Nothing to fix.\n")


def test_diff_writes_nothing_and_its_status_says_that_something_would_change(tree: Path) -> None:
    done = fix(tree, "--diff", "leak.py")
    assert (done.status, done.out) == (1, DIFF)
    assert (tree / "leak.py").read_text() == LEAK
    assert done.err.endswith("Would fix 1 finding in 1 file; none left.\n")
    (tree / "leak.py").write_text(FIXED)
    assert fix(tree, "--diff", "leak.py").status == 0


def test_the_diff_can_be_applied(tree: Path) -> None:
    (tree / "leak.py").write_bytes(LEAK.rstrip("\n").replace("\n", "\r\n").encode())
    patch = subprocess.run(
        ["git", "apply", "-"],
        cwd=tree,
        input=fix(tree, "--diff").out.encode(),
        check=False,
        capture_output=True,
    )
    assert patch.returncode == 0, patch.stderr
    assert (tree / "leak.py").read_bytes() == FIXED.rstrip("\n").replace("\n", "\r\n").encode()


def test_standard_input_goes_to_standard_output(tmp_path: Path) -> None:
    done = fix(tmp_path, "-", stdin=LEAK)
    assert (done.status, done.out) == (0, FIXED)
    assert fix(tmp_path, "-", stdin=FIXED).out == FIXED
    assert fix(tmp_path, "-", "--diff", stdin=LEAK).out == DIFF.replace("leak.py", "-")


def test_select_chooses_the_rules(tree: Path) -> None:
    done = fix(tree, "--unsafe-fixes", "--select", "PA106")
    assert (tree / "leak.py").read_text() == LEAK
    assert done.err.startswith("Fixed     cache.py:4: PA106 field-never-released\n")


def test_a_read_only_file_is_a_failure_said_beforehand(tree: Path) -> None:
    (tree / "leak.py").chmod(0o444)
    done = fix(tree)
    assert (tree / "leak.py").read_text() == LEAK
    assert "Left      leak.py:2: PA101 never-released\n          leak.py is read-only\n" in done.err
    assert done.status == 1


def test_a_file_that_does_not_parse_outweighs_the_fixes(tree: Path) -> None:
    (tree / "broken.py").write_text("def (:\n")
    done = fix(tree)
    assert done.status == 2
    assert "Not analysed: broken.py:1: not valid Python" in done.err
    assert done.err.endswith("1 file not analysed.\n")
    assert (tree / "leak.py").read_text() == FIXED


def test_what_holds_no_python_or_none_that_can_be_read_is_said(tmp_path: Path) -> None:
    assert fix(tmp_path).err == "Nothing was fixed: no Python file there, or all are excluded.\n"
    (tmp_path / "broken.py").write_text("def (:\n")
    done = fix(tmp_path)
    assert (done.status, done.err.splitlines()[-1]) == (2, "Nothing was fixed; 1 file not analysed.")


def test_a_fix_that_cannot_be_built_for_a_fault_of_ours_costs_no_other_finding(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(case: Case) -> FixOffer | None:
        raise KeyError("scores")

    rules = [
        replace(rule, fix=broken) if rule.meta.code == "PA101" else rule for rule in auditor.judge.all_rules()
    ]
    monkeypatch.setattr(auditor.judge, "all_rules", lambda: rules)
    done = fix(tree, "--unsafe-fixes", "--verbose")
    assert done.status == 2
    assert (tree / "leak.py").read_text() == LEAK
    assert "close" in (tree / "cache.py").read_text()
    assert "Left      leak.py:2: PA101 never-released\n          no fix could be built\n" in done.err
    assert (
        done.err.count("no fix of PA101: poolaudit failed with KeyError: 'scores' (test_fix_command.py:") == 1
    )
    assert "Not analysed: leak.py:2:" in done.err


def test_a_link_is_written_through(tree: Path) -> None:
    other = tree / "elsewhere"
    other.mkdir()
    (tree / "leak.py").rename(other / "leak.py")
    (tree / "leak.py").symlink_to(other / "leak.py")
    fix(tree)
    assert (tree / "leak.py").is_symlink()
    assert (other / "leak.py").read_text() == FIXED


def test_what_git_does_not_have_yet_is_warned_of(tree: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *arguments], cwd=tree, check=True, capture_output=True)

    warning = "poolaudit: warning: changes that git does not have yet are in leak.py\n"
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "x")
    assert uncommitted([str(tree / "leak.py")]) == set()
    assert warning not in fix(tree).err
    (tree / "leak.py").write_text("\n" + LEAK)
    assert warning in fix(tree).err
    (tree / "leak.py").unlink()
    (tree / "new.py").write_text(LEAK)
    assert warning.replace("leak.py", "new.py") in fix(tree).err


@pytest.mark.parametrize(
    ("answers", "fixed"),
    [
        ("y\n", ["a.py"]),
        ("n\ny\n", ["b.py"]),
        ("a\n", ["a.py", "b.py"]),
        ("y\nq\n", ["a.py"]),
        ("what?\ny\nn\n", ["a.py"]),
        ("", []),
    ],
)
def test_interactive(answers: str, fixed: list[str], tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(LEAK)
    done = fix(tmp_path, "--interactive", stdin=answers)
    assert [name for name in ("a.py", "b.py") if (tmp_path / name).read_text() == FIXED] == fixed
    assert done.status == 0
    assert "a.py:2: PA101 `pool.allocate(q.shape)` is never released" in done.err
    assert "\n    2: acquired here\n    4: returns here, still holding it\nsafe fix: try/finally" in done.err
    assert "+        pool.deallocate(scores)\n" in done.err
    assert "y: apply, n: leave, a: apply all of PA101, q: apply no more [y/n/a/q]" in done.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--select", "PA999"), "unknown rule code `PA999`"),
        (("nowhere.py",), "nowhere.py: no such file or directory"),
        (("-", "leak.py"), "`-` is standard input and cannot be fixed together with files"),
        (("-", "--interactive"), "standard input cannot be fixed with --interactive or --verify"),
        (("--diff", "--interactive"), "--diff writes nothing and asks nothing"),
    ],
)
def test_wrong_use(arguments: tuple[str, ...], said: str, tree: Path) -> None:
    done = fix(tree, *arguments)
    assert done.status == 2
    assert said in done.err
    assert "Traceback" not in done.err


def test_a_baseline_keeps_its_findings_unfixed(tree: Path) -> None:
    poolaudit("audit", "--isolated", "--no-cache", "--write-baseline", "known.json", "leak.py", cwd=tree)
    assert "Fixed 0 findings" in fix(tree, "--baseline", "known.json").err
    assert (tree / "leak.py").read_text() == LEAK


def test_audit_says_what_can_be_fixed(tree: Path) -> None:
    said = poolaudit("audit", "--isolated", "--no-cache", "--format", "json", cwd=tree).json
    assert {finding["code"]: finding["fix"] for finding in said["findings"]} == {
        "PA101": {"safety": "safe", "description": "try/finally around the life of `scores`"},
        "PA106": {"safety": "unsafe", "description": "`close` gives back `self.keys`"},
    }


def test_processes_and_the_cache_change_nothing(tree: Path) -> None:
    digests = set()
    for jobs in ("1", "2"):  # the second time from the cache
        said = poolaudit("fix", "--isolated", "--diff", "--unsafe-fixes", "--jobs", jobs, cwd=tree)
        digests.add(hashlib.sha256(said.out.encode()).hexdigest())
    assert len(digests) == 1
