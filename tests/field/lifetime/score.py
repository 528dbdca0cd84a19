"""Scores PA501-512 against labelled snippets, written after public bug threads before the rules were.

    python tests/field/lifetime/score.py [--json] [--verbose]

Each pa5xx.txt holds snippets: `=== NAME leak|clean THREAD`, then code in which `# leak` marks the line that
is to be reported. Every third snippet of a file is held out: the rules are never changed for its sake. What
the audit reports of a snippet beyond its mark, under any PA5 code, counts as a false alarm. Exit status 1:
precision or recall is at 90 % or below, in the one part or in the other.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent.parent))

from auditor.config import Settings  # noqa: E402 - needs the path above
from auditor.engine import Request, audit  # noqa: E402

GOAL = 0.90
HELD_OUT = 3  # one in so many
Place = tuple[int, str]  # line, code


@dataclass(frozen=True, slots=True)
class Snippet:
    """One labelled piece of code. `expected` is the mark of a leak, nothing where it is clean."""

    code: str
    name: str
    thread: str
    text: str
    expected: frozenset[Place]
    held_out: bool


@dataclass(frozen=True, slots=True)
class Score:
    """What was found, missed and wrongly reported in one part of the snippets."""

    snippets: int
    found: int
    missed: tuple[str, ...]
    false: tuple[str, ...]

    @property
    def precision(self) -> float:
        return self.found / max(self.found + len(self.false), 1)

    @property
    def recall(self) -> float:
        return self.found / max(self.found + len(self.missed), 1)


class BadSnippet(Exception):
    """A snippet whose label and marks disagree."""


def read_snippets(folder: Path = HERE) -> list[Snippet]:
    found: list[Snippet] = []
    for path in sorted(folder.glob("pa5*.txt")):
        parts = re.split(r"^=== ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
        found += [_snippet(path.stem.upper(), part, number) for number, part in enumerate(parts, 1)]
    return found


def _snippet(code: str, part: str, number: int) -> Snippet:
    head, _, text = part.partition("\n")
    name, label, thread = head.split()
    lines = [line for line, row in enumerate(text.splitlines(), 1) if row.endswith("# leak")]
    if len(lines) != (label == "leak"):
        raise BadSnippet(f"{code} {name}: labelled {label}, but {len(lines)} lines are marked")
    expected = frozenset((line, code) for line in lines)
    return Snippet(code, name, thread, text, expected, held_out=number % HELD_OUT == 0)


def reported(snippets: Iterable[Snippet]) -> dict[str, set[Place]]:
    """What the audit says of each snippet, by its name; each is a file of its own."""
    found: dict[str, set[Place]] = {snippet.name: set() for snippet in snippets}
    with tempfile.TemporaryDirectory() as folder:
        for snippet in snippets:
            Path(folder, f"{snippet.name}.py").write_text(snippet.text, encoding="utf-8")
        run = audit(Request((folder,), Settings(select=("PA5",)), Path(folder))).run
    for finding in run.findings:
        found[Path(finding.span.path).stem].add((finding.span.line, finding.code))
    return found


def score(snippets: Sequence[Snippet], reports: dict[str, set[Place]]) -> Score:
    hits = sum(len(each.expected & reports[each.name]) for each in snippets)
    missed = [
        f"{code} {each.name}:{line}" for each in snippets for line, code in each.expected - reports[each.name]
    ]
    false = [
        f"{code} {each.name}:{line}" for each in snippets for line, code in reports[each.name] - each.expected
    ]
    return Score(len(snippets), hits, tuple(sorted(missed)), tuple(sorted(false)))


def scores() -> dict[str, Score]:
    """The score of the snippets that the rules may be tuned on, and of those that are held out."""
    snippets = read_snippets()
    reports = reported(snippets)
    return {
        "tuned": score([each for each in snippets if not each.held_out], reports),
        "held out": score([each for each in snippets if each.held_out], reports),
    }


def _lines(part: str, result: Score, *, verbose: bool) -> Iterator[str]:
    counts = f"{result.found} leaks found, {len(result.missed)} missed, {len(result.false)} false"
    rates = f"precision {result.precision:.1%}, recall {result.recall:.1%}"
    yield f"{part}: {result.snippets} snippets, {counts}: {rates}"
    if verbose:
        yield from (f"  missed {each}" for each in result.missed)
        yield from (f"  false  {each}" for each in result.false)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    parser.add_argument("--verbose", action="store_true", help="name what was missed or wrongly reported")
    options = parser.parse_args(arguments)
    results = scores()
    if options.json:
        print(json.dumps({part: asdict(result) for part, result in results.items()}, indent=2))
    else:
        for part, result in results.items():
            print(*_lines(part, result, verbose=options.verbose), sep="\n")
    good = all(result.precision > GOAL and result.recall > GOAL for result in results.values())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
