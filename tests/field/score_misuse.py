"""Scores PA201-208 against the labels of misuse.json: misuse found, correct sites reported.

    python tests/field/score_misuse.py [--root DIR] [--verbose]

Four sets are scored, each by itself: code that the rules' author wrote (folder `misuse`), faults of bug
reports told again in our own words (folders `misuse_reports` and, for a later version of the rules,
`misuse_unseen`), and released packages. A package's labels are judged where DIR/NAME-VERSION holds it
unpacked, and are said to be left out otherwise. Exit status 1: a set misses a goal.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
RECALL_GOAL, FALSE_GOAL = 0.90, 0.05
OWN_FOLDERS = {
    "misuse": "written by ourselves",
    "misuse_reports": "after bug reports",
    "misuse_unseen": "after bug reports, not seen before",
}
PUBLIC = "released packages"
Found = set[tuple[str, int, str]]


@dataclass(frozen=True, slots=True)
class Site:
    """One labelled line: `code` is the rule that must speak there, None where none of PA2 may.

    `source` tells whether it was labelled before the first run, and after which report it was written."""

    package: str
    version: str
    file: str
    line: int
    code: str | None
    text: str
    source: str
    reason: str

    @property
    def folder(self) -> str:
        return f"{self.package}-{self.version}" if self.version else self.package

    @property
    def group(self) -> str:
        return OWN_FOLDERS.get(self.package, PUBLIC)


@dataclass(frozen=True, slots=True)
class Score:
    found: tuple[Site, ...]
    missed: tuple[Site, ...]
    silent: tuple[Site, ...]
    alarms: tuple[Site, ...]
    elsewhere: tuple[tuple[str, int, str], ...]

    @property
    def recall(self) -> float:
        return len(self.found) / max(1, len(self.found) + len(self.missed))

    @property
    def false_rate(self) -> float:
        return len(self.alarms) / max(1, len(self.alarms) + len(self.silent))

    @property
    def good(self) -> bool:
        return self.recall >= RECALL_GOAL and self.false_rate <= FALSE_GOAL


def labels() -> list[Site]:
    return [Site(**site) for site in json.loads((HERE / "misuse.json").read_text(encoding="utf-8"))["sites"]]


def audit(folder: Path) -> Found:
    """What PA2 says about a folder; paths are relative to it."""
    command = [sys.executable, "-m", "auditor.cli", "audit", ".", "--no-cache", "--no-progress"]
    settings = (
        ["--isolated"] if folder.name == "misuse" else ["--config", str(HERE / "misuse-protocols.toml")]
    )
    done = subprocess.run(
        [*command, *settings, "--select", "PA2", "--format", "json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.stdout:
        raise SystemExit(f"score: the audit of {folder.name} failed: {done.stderr.strip()[-300:]}")
    return {(each["path"], each["line"], each["code"]) for each in json.loads(done.stdout)["findings"]}


def compare(sites: Sequence[Site], found: Found) -> Score:
    """A misuse counts as found if its own rule reports its line; a clean line must have no finding at all."""
    spoken = {(path, line) for path, line, _ in found}
    wrong = [site for site in sites if site.code is not None]
    clean = [site for site in sites if site.code is None]
    known = {(site.file, site.line) for site in sites}
    return Score(
        found=tuple(site for site in wrong if (site.file, site.line, site.code) in found),
        missed=tuple(site for site in wrong if (site.file, site.line, site.code) not in found),
        silent=tuple(site for site in clean if (site.file, site.line) not in spoken),
        alarms=tuple(site for site in clean if (site.file, site.line) in spoken),
        elsewhere=tuple(sorted(each for each in found if each[:2] not in known)),
    )


def as_text(score: Score, verbose: bool = False) -> str:
    wrong, clean = len(score.found) + len(score.missed), len(score.alarms) + len(score.silent)
    lines = [
        f"misuse found          {len(score.found)}/{wrong} = {score.recall:.1%} (goal {RECALL_GOAL:.0%})",
        f"clean sites reported  {len(score.alarms)}/{clean} = {score.false_rate:.1%} (goal {FALSE_GOAL:.0%})",
        f"findings elsewhere    {len(score.elsewhere)}",
    ]
    lines += [f"MISSED {s.code}: {s.folder} {s.file}:{s.line} {s.text}" for s in score.missed]
    lines += [f"FALSE: {s.folder} {s.file}:{s.line} {s.text}" for s in score.alarms]
    lines += [f"elsewhere: {path}:{line} {code}" for path, line, code in score.elsewhere]
    if verbose:
        lines += [f"found {s.code}: {s.file}:{s.line} {s.text}" for s in score.found]
    return "\n".join(lines)


def score_folder(folder: Path, sites: Sequence[Site]) -> Score:
    """The labels of one folder against what an audit of it says about the labelled files."""
    files = {site.file for site in sites}
    return compare(sites, {each for each in audit(folder) if each[0] in files})


def together(scores: Sequence[Score]) -> Score:
    return Score(
        *(tuple(chain.from_iterable(getattr(each, part.name) for each in scores)) for part in fields(Score))
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the score of each set; the exit status says whether all reach both goals."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, help="folder with packages unpacked as NAME-VERSION")
    parser.add_argument("--verbose", action="store_true", help="list what was found as well")
    chosen = parser.parse_args(arguments)
    groups: dict[str, list[Score]] = {}
    for name in dict.fromkeys(site.folder for site in labels()):
        sites = [site for site in labels() if site.folder == name]
        folder = HERE / name if name in OWN_FOLDERS else chosen.root and chosen.root / name
        if folder is None or not folder.is_dir():
            print(f"left out: {name}; --root names the folder it was unpacked in", file=sys.stderr)
            continue
        groups.setdefault(sites[0].group, []).append(score_folder(folder, sites))
    scores = {group: together(parts) for group, parts in groups.items()}
    for group, score in scores.items():
        print(f"{group}\n{as_text(score, chosen.verbose)}\n")
    return 0 if all(score.good for score in scores.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
