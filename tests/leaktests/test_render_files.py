"""Generated files: what they hold, that they are Python, the same each time, and never lose work."""

import ast
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from auditor.leaktests.plan import Argument, Plan, Target, Variation
from auditor.leaktests.render import aim_name, file_name, render
from auditor.leaktests.writing import Written, marked, untouched, write_generated

PLAN = Plan(
    target=Target("src/pkg/attend.py", 7, "pkg.attend", "Attend", "module", "/project/src"),
    build=(Argument("dim", "64"),),
    feed=(Argument("x", "torch.randn(b, n, 64, device=device)"),),
    shapes=((2, 32), (1, 33)),
    scenarios=("train", "eval"),
    differentiable=True,
    operations=40,
    fault_shape=1,
    left_out=(("pickled", "AttributeError: a lambda"),),
    switch=(Argument("enable_memory_pool", "True"),),
    pool_scenarios=("train", "eval"),
    aimed=(
        Variation(
            "abcdef123456",
            "PA102",
            "src/pkg/attend.py:20",
            'a "quoted" \\ message',
            (Argument("dim", "64"), Argument("enable_memory_pool", "True")),
            (Argument("x", "torch.randn(b, n, 64, device=device)"),),
            (1, 33),
        ),
    ),
)
FOLDER = Path("/project/tests/generated")


def functions(text: str) -> list[str]:
    return [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]


def test_a_pooled_module_has_every_pass_and_its_planted_twin() -> None:
    assert functions(render(PLAN, FOLDER)) == [
        "elsewhere",
        "build",
        "feed",
        "pooled",
        "test_memory_stays_level",
        "test_a_planted_leak_is_found",
        "test_nothing_grows_unseen",
        "test_a_planted_object_is_found",
        "test_nothing_stays_held_after_a_failure",
        "test_what_a_planted_failure_holds_is_found",
        "test_every_lease_comes_back",
        "test_a_planted_lease_is_found",
        "test_the_pool_changes_no_bit",
        "test_no_lease_stays_out_after_a_failed_acquire",
        "test_PA102_attend_line_20_abcdef",
    ]


def test_what_a_reader_needs_is_in_the_file() -> None:
    text = render(PLAN, FOLDER)
    assert "from pkg.attend import Attend" in text
    assert 'sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]' in text
    assert "SHAPES = [(2, 32), (1, 33)]" in text
    assert "pickled: AttributeError: a lambda" in text
    assert "return Attend(dim=64, **options).to(device)" in text
    assert "lambda turn: feed(1)" in text


def test_only_used_names_are_imported() -> None:
    plain = msgspec.structs.replace(PLAN, switch=(), pool_scenarios=(), aimed=(), operations=401)
    text = render(plain, FOLDER)
    for name in ("pools_of", "assert_no_leases", "assert_equivalent", "inject_faults"):
        assert name not in text
    assert functions(text) == [
        "elsewhere",
        "build",
        "feed",
        "test_memory_stays_level",
        "test_a_planted_leak_is_found",
        "test_nothing_grows_unseen",
        "test_a_planted_object_is_found",
    ]


def test_an_installed_package_needs_no_path() -> None:
    target = msgspec.structs.replace(PLAN.target, root="/venv/lib/python3.11/site-packages")
    text = render(msgspec.structs.replace(PLAN, target=target), FOLDER)
    assert "sys.path[:0] = [str(HERE)]" in text


@pytest.mark.parametrize("kind", ["function", "autograd"])
def test_functions_are_called_as_they_are(kind: str) -> None:
    target = msgspec.structs.replace(PLAN.target, kind=kind, name="attend")
    feed = (Argument("q", "torch.randn(b, n, 64, device=device)", positional=True),)
    plan = msgspec.structs.replace(PLAN, target=target, feed=feed, switch=(), pool_scenarios=())
    text = render(plan, FOLDER)
    assert f"    return attend{'.apply' if kind == 'autograd' else ''}\n" in text
    assert "return (torch.randn(b, n, 64, device=device),), {}" in text


def test_names_tell_findings_and_modules_apart() -> None:
    assert file_name(PLAN) == "test_leaks_pkg_attend_Attend.py"
    assert aim_name(PLAN.aimed[0]) == "test_PA102_attend_line_20_abcdef"


def test_a_second_run_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "tests" / "test_leaks.py"
    first, second = Written(), Written()
    write_generated(file, render(PLAN, FOLDER), first)
    before = file.stat().st_mtime_ns
    write_generated(file, render(PLAN, FOLDER), second)
    assert (first.fresh, second.unchanged, second.fresh) == ([file], [file], [])
    assert file.stat().st_mtime_ns == before


@dataclass(frozen=True)
class Case:
    present: str
    kept: bool


@pytest.mark.parametrize(
    "case",
    [
        Case(marked("x = 1\n"), kept=False),
        Case(marked("x = 1\n") + "y = 2\n", kept=True),
        Case("# mine\n", kept=True),
        Case("", kept=True),
    ],
)
def test_what_a_person_wrote_is_not_written_over(tmp_path: Path, case: Case) -> None:
    file = tmp_path / "test_leaks.py"
    file.write_text(case.present)
    written = Written()
    write_generated(file, "x = 3\n", written)
    assert written.kept == ([file] if case.kept else [])
    assert file.read_text() == (case.present if case.kept else marked("x = 3\n"))
    assert untouched(file.read_text()) is not case.kept


def test_the_support_beside_our_own_generated_tests_is_the_one_we_ship() -> None:
    root = Path(__file__).parents[2]
    shipped = {
        file.name: marked(file.read_text("utf-8"))
        for file in (root / "auditor/leaktests/support").glob("*.py")
    }
    copies = (root / "tests/generated/leak_support").glob("*.py")
    assert {file.name: file.read_text("utf-8") for file in copies} == shipped
