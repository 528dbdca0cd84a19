"""Scores the audit against programs labelled in their own code: `# leak: why`, `# clean: why`.

    python -m tests.field.score_programs [strangers] [--verbose]

The sets, strangers/ and others, are by authors who know nothing of the analysis.
Each program is audited alone, with the built-in protocols of files and locks and what the set's own
protocols.toml declares.
Findings on exceptions (PA103) and context managers (PA111) are not counted, as in score.py.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from auditor.config import Settings
from tests.field.score import FALSE_RATE_GOAL, NOT_JUDGED, RECALL_GOAL
from tests.marked_code import audited

SETS = (
    "strangers",
    "serving",
    "training",
    "services",
    "attention",
    "companies",
    "exam",
    "practice",
    "verdicts",
    "outsiders",
    "bystanders",
    "passersby",
    "commuters",
    "couriers",
    "trainers",
    "operators",
    "makers",
    "declared",
    "engines",
    "libraries",
    "postmortems",
    "backends",
    "runtimes",
    "labellers",
    "platforms",
    "kernels",
    "reviewers",
    "examiners",
    "maintainers",
    "colleagues",
    "inspectors",
    "tutors",
    "surveyors",
    "mentors",
    "advisers",
    "stewards",
    "wardens",
    "curators",
    "referees",
    "jurors",
    "assessors",
    "ushers",
    "keepers",
    "deputies",
    "stokers",
    "brokers",
    "sextons",
    "coopers",
    "farriers",
    "glaziers",
    "thatchers",
    "chandlers",
    "masons",
    "joiners",
    "wrights",
    "tanners",
    "weavers",
    "saddlers",
    "millers",
    "potters",
    "drovers",
    "porters",
    "hatters",
    "tinkers",
    "carters",
    "turners",
    "bakers",
    "grocers",
    "pilots",
    "auditors",
    "colliers",
    "cobblers",
    "fletchers",
    "carvers",
    "dyers",
    "brewers",
    "smiths",
    "spinners",
    "sawyers",
    "tilers",
    "plumbers",
    "slaters",
    "roofers",
    "curriers",
    "ropers",
    "cutlers",
    "lorimers",
    "fullers",
    "gilders",
    "pewterers",
    "quarriers",
    "founders",
    "nailers",
    "skinners",
    "braziers",
    "mercers",
    "vintners",
    "cordwainers",
    "glovers",
    "tuckers",
    "reeves",
    "bailiffs",
    "chapmen",
    "ostlers",
    "scriveners",
    "sculptors",
    "bargees",
    "notaries",
    "weighers",
    "hosiers",
    "ferrymen",
    "hatmakers",
    "dowsers",
    "cellarers",
    "weirkeepers",
    "girdlers",
    "limeburners",
    "millwrights",
    "beekeepers",
    "wellsinkers",
    "storekeepers",
    "messengers",
    "salters",
    "fowlers",
    "bowyers",
    "harpers",
    "lockkeepers",
    "ropewalkers",
    "riggers",
    "lightermen",
    "gravers",
    "pedlars",
    "sailmakers",
    "netmakers",
    "pinmakers",
    "bellfounders",
    "saltmakers",
    "ropemakers",
    "raftsmen",
    "lockmakers",
    "capstans",
    "windlasses",
    "brushmakers",
    "clockmakers",
    "needlemakers",
    "basketmakers",
    "coppersmiths",
    "ropeworkers",
    "bellringers",
    "lacemakers",
    "glassblowers",
    "shipwrights",
    "cartographers",
    "papermakers",
    "stonecutters",
    "netmenders",
    "wheelwrights",
    "parchmenters",
    "ropespinners",
    "tinsmiths",
    "cordmakers",
    "tallymen",
    "wainwrights",
    "bookbinders",
    "fishmongers",
    "chairmakers",
    "clogmakers",
    "dairymen",
    "hoopers",
    "oarsmen",
    "boatmen",
    "gatekeepers",
    "archers",
    "falconers",
    "heralds",
    "masters",
    "squires",
    "yeomen",
    "shepherds",
    "reapers",
    "huntsmen",
    "minstrels",
    "lamplighters",
    "vergers",
    "cartwrights",
)
_HERE = Path(__file__).parent
JUDGED = {"select": ["PA1"], "enable-protocols": ["files", "locks"]}
_LABEL = re.compile(r"#\s*(leak|clean):\s*(.*)$")


@dataclass(frozen=True, slots=True)
class Labelled:
    """One acquiring call, what its author says of it, and whether the audit reports it."""

    path: str
    line: int
    leaks: bool
    reason: str
    codes: tuple[str, ...]
    told: bool  # by PA103 or PA111, which do not count


def programs(of: str) -> list[Path]:
    """Modules and packages of a set, each audited for itself."""
    return sorted(
        entry
        for entry in (_HERE / of).iterdir()
        if entry.suffix == ".py" or (entry.is_dir() and any(entry.rglob("*.py")))
    )


def settings(of: str) -> Settings:
    declared = _HERE / of / "protocols.toml"
    protocols = tomllib.loads(declared.read_text(encoding="utf-8")) if declared.exists() else {}
    return msgspec.convert(JUDGED | protocols, Settings)


def judged(program: Path) -> tuple[list[Labelled], list[str]]:
    """Its labels with what was reported there, and what was reported elsewhere."""
    run = audited(program.parent, program.name, settings(program.parent.name))
    assert not run.failures, run.failures
    codes: dict[tuple[str, int], list[str]] = {}
    told: set[tuple[str, int]] = set()
    for finding in run.findings:
        place = finding.span.path, finding.span.line
        if finding.code in NOT_JUDGED:
            told.add(place)
        else:
            codes.setdefault(place, []).append(finding.code)
    labels = [
        Labelled(path, line, leaks, reason, tuple(codes.pop((path, line), ())), (path, line) in told)
        for path, line, leaks, reason in _labels(program)
    ]
    return labels, [f"{path}:{line}" for path, line in sorted(codes)]


def _labels(program: Path) -> Iterator[tuple[str, int, bool, str]]:
    for file in sorted(program.rglob("*.py")) if program.is_dir() else [program]:
        for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if found := _LABEL.search(text):
                yield str(file.relative_to(program.parent)), number, found[1] == "leak", found[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("of", nargs="?", choices=SETS, default=SETS[0], help="the set of programs")
    parser.add_argument("--verbose", action="store_true", help="name what is missed and what is wrongly said")
    options = parser.parse_args()
    labels: list[Labelled] = []
    unlabelled: list[str] = []
    for program in programs(options.of):
        its, others = judged(program)
        labels += its
        unlabelled += others
    leaks = [each for each in labels if each.leaks]
    clean = [each for each in labels if not each.leaks]
    missed, false = [each for each in leaks if not each.codes], [each for each in clean if each.codes]
    if options.verbose:
        for each in (*missed, *false):
            said = "missed" if each.leaks else "false"
            print(f"{said} {each.path}:{each.line} {each.reason} {' '.join(each.codes)}")
        print(*(f"without a label {place}" for place in unlabelled), sep="\n")
    found = len(leaks) - len(missed)
    told = sum(each.told for each in missed)
    print(
        f"leaks found {found} of {len(leaks)} = {found / len(leaks):.1%}; {told} more told by PA103 or PA111"
    )
    print(f"clean reported {len(false)} of {len(clean)} = {len(false) / len(clean):.1%}")
    print(f"reported where no label is {len(unlabelled)}")
    kept = found / len(leaks) >= RECALL_GOAL and len(false) / len(clean) <= FALSE_RATE_GOAL
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
