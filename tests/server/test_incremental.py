"""What the server remembers changes no answer; a glance tells of the edited file, a whole audit of all."""

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from auditor.model import Finding
from auditor.server import workplace
from auditor.server.recurring import Outdated
from auditor.server.workplace import Answer, Workplace

ROOT = Path(__file__).parent.parent.parent
POOL = """\
class Slots:
    def __init__(self):
        self.free = list(range(8))

    def alloc_berth(self):
        return self.free.pop()

    def free_berth(self, slot):
        self.free.append(slot)
"""
USER = """\
from slots import Slots


def take(slots: Slots):
    return slots.alloc_berth()


def use(slots: Slots, n):
    slot = take(slots)
    if n:
        return
    slots.free_berth(slot)
"""
FAR = """\
from slots import Slots
from user import take


def far(slots: Slots, n):
    slot = take(slots)
    if n:
        return
    slots.free_berth(slot)
"""


MORE = """

def again(slots: Slots):
    return take(slots)


def lose(slots: Slots):
    again(slots)
"""


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the smallest tree is worth a glance."""
    monkeypatch.setattr(workplace, "WORTH_A_GLANCE", 0.0)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {"slots.py": POOL, "user.py": USER, "far.py": FAR}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def place_for(tree: Path) -> Workplace:
    return Workplace(str(tree), (str(tree),), 1)


def places(answer: Answer) -> list[tuple[str, str, int]]:
    assert answer.wrong == ""
    return [(Path(f.span.path).name, f.code, f.span.line) for f in answer.findings]


def told(answer: Answer) -> list[Finding]:
    assert (answer.wrong, answer.settled) == ("", True)
    return list(answer.findings)


def anew(tree: Path, documents: Mapping[str, str]) -> list[Finding]:
    """What a process without any memory finds."""
    shutil.rmtree(tree / ".poolaudit_cache", ignore_errors=True)
    return told(place_for(tree).check(documents))


def test_a_glance_follows_the_edited_file_and_leaves_the_others(tree: Path) -> None:
    place, user = place_for(tree), str(tree / "user.py")
    assert places(place.check({})) == [("far.py", "PA102", 6), ("user.py", "PA102", 9)]
    glance = place.check({user: "\n\n" + USER}, glance=True)
    assert not glance.settled
    assert places(glance) == [("far.py", "PA102", 6), ("user.py", "PA102", 11)]
    assert list(glance.findings) == anew(tree, {user: "\n\n" + USER})


def test_a_glance_sees_wrappers_of_other_files_and_new_ones_of_its_own(tree: Path) -> None:
    place, far = place_for(tree), str(tree / "far.py")
    place.check({})
    more = FAR + MORE
    glance = place.check({far: more}, glance=True)
    assert places(glance) == [
        ("far.py", "PA102", 6),
        ("far.py", "PA104", 17),
        ("user.py", "PA102", 9),
    ]
    assert list(glance.findings) == anew(tree, {far: more})


def test_what_an_edit_means_elsewhere_waits_for_the_whole_audit(tree: Path) -> None:
    place, slots = place_for(tree), str(tree / "slots.py")
    place.check({})
    other = POOL.replace("alloc_berth", "other_berth")
    assert places(place.check({slots: other}, glance=True)) == [
        ("far.py", "PA102", 6),
        ("user.py", "PA102", 9),
    ]
    assert told(place.check({slots: other})) == []
    assert told(place.check({slots: POOL})) == anew(tree, {})


def test_a_closed_document_is_never_glanced_at(tree: Path) -> None:
    place, user, far = place_for(tree), str(tree / "user.py"), str(tree / "far.py")
    place.check({user: USER})
    assert not place.check({user: "\n" + USER}, glance=True).settled
    place.check({user: "\n" + USER})
    closed = place.check({}, glance=True)  # the last whole audit read the document, not the file
    assert told(closed) == anew(tree, {})
    place.check({user: "\n" + USER})
    assert told(place.check({far: FAR}, glance=True)) == anew(tree, {})


def test_a_glance_at_a_new_file_and_at_one_that_is_mended(tree: Path) -> None:
    place = place_for(tree)
    place.check({})
    new, user = str(tree / "new.py"), str(tree / "user.py")
    documents = {new: FAR, user: USER.replace("    if n:\n        return\n", "")}
    glance = place.check(documents, glance=True)
    assert places(glance) == [("far.py", "PA102", 6), ("new.py", "PA102", 6)]
    assert list(glance.findings) == told(place.check(documents)) == anew(tree, documents)


def test_after_an_answer_from_the_cache_the_pause_makes_a_glance_possible(tree: Path) -> None:
    user = str(tree / "user.py")
    place_for(tree).check({})
    place = place_for(tree)
    place.check({user: USER})
    assert place.check({user: "\n" + USER}, glance=True).settled  # nothing to build on yet
    place = place_for(tree)
    place.check({user: USER})
    place.rest()
    glance = place.check({user: "\n" + USER}, glance=True)
    assert (glance.settled, places(glance)[-1]) == (False, ("user.py", "PA102", 10))


@pytest.mark.parametrize("patience", [0, 1, 5, 20, 60])
def test_an_audit_that_is_left_spoils_nothing(tree: Path, patience: int) -> None:
    """Wherever it is left, what is kept of it is true."""
    calls = -1  # without an end until the edit

    def watch() -> None:
        nonlocal calls
        if calls == 0:
            raise Outdated
        calls -= 1

    place, user = Workplace(str(tree), (str(tree),), 1, watch), str(tree / "user.py")
    place.check({})
    calls = patience
    with contextlib.suppress(Outdated):
        place.check({user: "\n" + USER})
    calls = -1
    assert places(place.check({user: "\n\n" + USER}, glance=True))[-1] == ("user.py", "PA102", 11)
    assert told(place.check({user: "\n\n" + USER})) == anew(tree, {user: "\n\n" + USER})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_session_of_edits_ends_at_what_an_audit_says(tmp_path: Path) -> None:
    """Every file of the example loses a line and some get it back; each answer is as without memory."""
    tree = tmp_path / "longdoc"
    shutil.copytree(ROOT / "examples" / "longdoc", tree, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    place = place_for(tree)
    documents: dict[str, str] = {}
    files = sorted(tree.rglob("*.py"))
    for turn, file in enumerate(files):
        lines = file.read_text().splitlines(keepends=True)
        cut = len(lines) * (turn + 1) // (len(files) + 1)
        documents[str(file)] = "".join(lines[:cut] + lines[cut + 1 :])
        place.check(documents, glance=True)
        if turn % 5 == 4:
            assert told(place.check(documents)) == anew(tree, documents)
        if turn % 3 == 2:
            documents.pop(str(files[turn - 1]))
    assert told(place.check({})) == anew(tree, {})
