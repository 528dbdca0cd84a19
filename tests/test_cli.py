"""The command line: formats, outputs, statuses, selection, help, and what it never imports."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import PROJECT, UNUSED, places, poolaudit, without_seconds

INFO_FREE = "x = 1\n"


def test_clean_tree(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(INFO_FREE)
    done = poolaudit("audit", "--format", "json", cwd=tmp_path)
    assert (done.status, done.json["findings"], done.json["failures"]) == (0, [], [])
    assert done.json["summary"]["files"] == 1
    assert done.json["summary"]["lines"] == 1


def test_findings_go_to_standard_output_and_the_rest_to_standard_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(UNUSED)
    done = poolaudit("audit", "--format", "concise", cwd=tmp_path)
    assert done.status == 1
    assert done.out == "a.py:1:10: PA002 unused-ignore [warning] PA101 silences nothing here\n"
    assert "1 file" in done.err
    quiet = poolaudit("audit", "--format", "concise", "--quiet", cwd=tmp_path)
    assert (quiet.out, quiet.err) == (done.out, "")
    assert poolaudit("audit", "--exit-zero", cwd=tmp_path).status == 0


def test_a_failure_is_status_2_and_named_and_the_rest_is_complete(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(UNUSED)
    (tmp_path / "bad.py").write_text("x = 1\ndef f(:\n")
    done = poolaudit("audit", "--format", "json", "--exit-zero", cwd=tmp_path)
    assert done.status == 2
    assert places(done.json) == [("a.py", 1, "PA002")]
    [failure] = done.json["failures"]
    assert (failure["path"], failure["line"]) == ("bad.py", 2)
    assert failure["message"].startswith("not valid Python 3.")
    assert done.json["summary"]["files_failed"] == 1
    assert "bad.py" in done.err
    assert "bad.py" in poolaudit("audit", "--quiet", cwd=tmp_path).err


def test_comments_of_a_failed_file_are_not_judged(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(UNUSED + "def f(:\n")
    assert poolaudit("audit", "--format", "json", cwd=tmp_path).json["findings"] == []


def test_standard_input(tmp_path: Path) -> None:
    done = poolaudit("audit", "-", "--format", "json", cwd=tmp_path, stdin=UNUSED.encode())
    assert (done.status, places(done.json)) == (1, [("-", 1, "PA002")])
    again = poolaudit("audit", "-", "--format", "json", cwd=tmp_path, stdin=b"x = 1\n")
    assert (again.status, places(again.json)) == (0, [])


def test_missing_path(tmp_path: Path) -> None:
    done = poolaudit("audit", "nowhere.py", cwd=tmp_path)
    assert (done.status, done.out) == (2, "")
    assert "nowhere.py: no such file or directory" in done.err
    assert "Traceback" not in done.err


def test_select_and_ignore(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1  # poolaudit: ignore\n")
    (tmp_path / "poolaudit.toml").write_text("ignore = ['PA001']\n")

    def codes(*options: str) -> list[str]:
        done = poolaudit("audit", "--format", "json", *options, cwd=tmp_path)
        return [finding["code"] for finding in done.json["findings"]]

    assert codes() == ["PA002"]
    assert codes("--isolated") == ["PA001", "PA002"]
    assert codes("--select", "PA0") == ["PA001", "PA002"]
    assert codes("--select", "PA001,PA3") == ["PA001"]
    assert codes("--select", "ALL", "--ignore", "PA002") == ["PA001"]
    assert codes("--ignore", "PA0") == []
    unknown = poolaudit("audit", "--select", "PA003", cwd=tmp_path)
    assert unknown.status == 2
    assert "unknown rule code `PA003`; did you mean `PA00" in unknown.err


def test_per_file_ignores(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.py").write_text(UNUSED)
    (tmp_path / "b.py").write_text(UNUSED)
    (tmp_path / "poolaudit.toml").write_text("[per-file-ignores]\n'tests/' = ['PA0']\n")
    done = poolaudit("audit", "--format", "json", cwd=tmp_path)
    assert places(done.json) == [("b.py", 1, "PA002")]


def test_several_formats_and_files(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(UNUSED)
    out = tmp_path / "out.json"
    out.write_text("old")
    done = poolaudit("audit", "--format", "concise", "--output", f"json={out}", cwd=tmp_path)
    assert done.out.startswith("a.py:1:10: PA002")
    assert places(poolaudit("audit", "--format", "json", cwd=tmp_path).json) == [("a.py", 1, "PA002")]
    assert '"PA002"' in out.read_text()
    single = poolaudit("audit", "--format", "concise", "--output", "c.txt", cwd=tmp_path)
    assert (single.out, (tmp_path / "c.txt").read_text()) == ("", done.out)
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--format", "concise", "--format", "json", "--output", "x"], "which format?"),
        (["--output", "x", "--output", "y"], "given twice"),
        (["--output", "json=x", "--output", "json=y"], "given twice"),
        (["--format", "nonsense"], "'nonsense' is not one of"),
        (["--jobs", "0"], "0 is not in the range"),
        (["--nonsense"], "No such option"),
        (["--output", "no/such/folder/x"], "No such file or directory"),
        (["--config", "gone.toml"], "gone.toml: cannot be read"),
    ],
)
def test_wrong_use(tmp_path: Path, options: list[str], said: str) -> None:
    (tmp_path / "a.py").write_text(UNUSED)
    done = poolaudit("audit", *options, cwd=tmp_path)
    assert done.status == 2
    assert said in done.err
    assert "Traceback" not in done.err


def test_runs_differ_in_seconds_alone(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"m{number}.py").write_text(UNUSED * (number % 3) + "import memory_pool\n")
    (tmp_path / "bad.py").write_text("(")
    options = ["--format", "json"]
    runs = [
        poolaudit("audit", *options, "--jobs", "1", "--no-cache", cwd=tmp_path),
        poolaudit("audit", *options, "--jobs", "2", "--no-cache", cwd=tmp_path),
        poolaudit("audit", *options, "--jobs", "2", cwd=tmp_path),
        poolaudit("audit", *options, "--jobs", "1", cwd=tmp_path),
        poolaudit("audit", *options, "m7.py", ".", "bad.py", cwd=tmp_path),
        poolaudit("audit", *options, "bad.py", ".", "m7.py", cwd=tmp_path),
    ]
    documents = [without_seconds(run.out) for run in runs]
    assert all(document == documents[0] for document in documents)
    assert len(documents[0]["findings"]) > 30
    assert [run.status for run in runs] == [2] * 6


def test_colour(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(UNUSED)
    assert "\x1b[" not in poolaudit("audit", cwd=tmp_path).out
    assert "\x1b[" in poolaudit("audit", "--color", "always", cwd=tmp_path).out
    assert "\x1b[" not in poolaudit("audit", "--color", "never", cwd=tmp_path).out


def test_an_ascii_console_gets_escapes_not_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "é.py").write_text(UNUSED)
    done = poolaudit("audit", "--format", "concise", cwd=tmp_path, PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.status == 1
    assert r"\xe9.py:1:10" in done.out


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(UNUSED * 5000)
    command = f"{sys.executable} -m auditor.cli audit --format concise --quiet | head -1"
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, capture_output=True, env={"PYTHONPATH": str(PROJECT)}, check=False
    )
    assert done.stdout.count(b"\n") == 1
    assert done.stderr == b""


def test_internal_errors_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(UNUSED)
    program = (
        "import sys, auditor.judge\n"
        "def broken(*_): raise KeyError('lost')\n"
        "auditor.judge.arbitrate = broken\n"
        "from auditor.cli import main\n"
        "sys.argv = ['poolaudit', 'audit', *sys.argv[1:]]\n"
        "main()\n"
    )

    def run(*options: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-c", program, *options],
            cwd=tmp_path,
            capture_output=True,
            env={"PYTHONPATH": str(PROJECT)},
        )
        return done.returncode, done.stderr.decode()

    assert run() == (2, "poolaudit: internal error: KeyError: 'lost' (--verbose shows where)\n")
    status, err = run("--verbose")
    assert status == 2
    assert "Traceback (most recent call last)" in err


def test_rule_pages(tmp_path: Path) -> None:
    page = poolaudit("rule", "PA002", cwd=tmp_path)
    assert page.status == 0
    assert page.out.startswith("PA002 unused-ignore: ")
    for part in (
        "What: ",
        "Why: ",
        "\nBad:\n\n    def f(x):",
        "\nGood:\n\n    def f(x):",
        "Severity: warning. On by default.",
    ):
        assert part in page.out
    assert "PA001" in poolaudit("rule", "--all", cwd=tmp_path).out
    assert "PA001" in poolaudit("rule", "pa0", cwd=tmp_path).out


@pytest.mark.parametrize("arguments", [[], ["PA002", "--all"], ["PA003"]])
def test_rule_wrong_use(tmp_path: Path, arguments: list[str]) -> None:
    done = poolaudit("rule", *arguments, cwd=tmp_path)
    assert (done.status, done.out) == (2, "")
    assert done.err


def test_help_and_version(tmp_path: Path) -> None:
    assert poolaudit("--version", cwd=tmp_path).out.startswith("poolaudit, version ")
    for command in ("audit", "config", "rule"):
        assert command in poolaudit("--help", cwd=tmp_path).out
        done = poolaudit(command, "--help", cwd=tmp_path)
        assert (done.status, done.err) == (0, "")
    assert poolaudit("adopt", cwd=tmp_path).status == 2


def imported(*arguments: str, cwd: Path) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "auditor.cli", *arguments],
        cwd=cwd,
        capture_output=True,
        env={"PYTHONPATH": str(PROJECT)},
    )
    return {line.rpartition("|")[2].strip() for line in done.stderr.decode().splitlines() if "|" in line}


def test_what_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(UNUSED)
    heavy = {"networkx", "libcst", "jinja2", "torch", "rich.console"}
    assert not imported("--version", cwd=tmp_path) & (heavy | {"msgspec", "pathspec", "auditor.engine"})
    poolaudit("audit", cwd=tmp_path)
    warm = imported("audit", "--format", "json", cwd=tmp_path)
    assert "auditor.engine" in warm
    assert not warm & (heavy | {"auditor.examine", "auditor.project.analysis"})
    assert not imported("audit", "--no-cache", cwd=tmp_path) & {"torch"}
