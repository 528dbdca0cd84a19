"""Scores the audit against the hand-made judgements of labels.json: true leaks found, correct sites reported.

    python tests/field/score.py --root DIR [--package NAME] [--labels FILE] [--json] [--verbose]

DIR/NAME holds the unpacked wheel of each labelled package. Exit status 1: a goal is missed; 2: not measured.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
RECALL_GOAL = 0.90
FALSE_RATE_GOAL = 0.05
NOT_JUDGED = frozenset(
    {"PA103", "PA111"}
)  # raising paths and context managers are judged by their own fixtures


class NotMeasured(Exception):
    """The score cannot be taken; the message says what to do about it."""


@dataclass(frozen=True, slots=True)
class Site:
    """One acquiring call with the verdict of the person who read it; `after_run` if a report led there."""

    package: str
    version: str
    file: str
    line: int
    column: int
    text: str
    protocol: str
    verdict: str
    exception_only: bool
    reason: str
    after_run: bool = False

    @property
    def leaks(self) -> bool:
        return self.verdict == "leak"


@dataclass(frozen=True, slots=True)
class Report:
    """One finding of an audit, as far as it matters here."""

    package: str
    file: str
    line: int
    column: int
    code: str


@dataclass(frozen=True, slots=True)
class Score:
    """How the reports compare with the sites; `unlabelled` are reports that no site speaks of, `raising` are
    missed leaks of which a rule about raising paths speaks."""

    found: tuple[Site, ...] = ()
    missed: tuple[Site, ...] = ()
    silent: tuple[Site, ...] = ()
    alarms: tuple[tuple[Site, str], ...] = ()
    unlabelled: int = 0
    codes: dict[str, int] = field(default_factory=dict)
    raising: tuple[Site, ...] = ()

    @property
    def without_raises(self) -> tuple[int, int]:
        """Found and all leaks, but for those that only an exception loses."""
        found = sum(not site.exception_only for site in self.found)
        return found, found + sum(not site.exception_only for site in self.missed)

    @property
    def recall(self) -> float:
        leaks = len(self.found) + len(self.missed)
        return len(self.found) / leaks if leaks else 1.0

    @property
    def false_rate(self) -> float:
        correct = len(self.silent) + len(self.alarms)
        return len(self.alarms) / correct if correct else 0.0

    @property
    def blind(self) -> tuple[int, int]:
        """Alarms and clean sites without those that a report led to, which raise the rate by their choice."""
        alarms = sum(not site.after_run for site, _ in self.alarms)
        return alarms, alarms + sum(not site.after_run for site in self.silent)

    @property
    def good(self) -> bool:
        return self.recall >= RECALL_GOAL and self.false_rate <= FALSE_RATE_GOAL


def read_labels(file: Path) -> tuple[Site, ...]:
    """The labelled sites of a file in the format of labels.json."""
    return tuple(Site(**site) for site in json.loads(file.read_text(encoding="utf-8"))["sites"])


def judged(code: str) -> bool:
    """Whether findings of this rule take part in the score."""
    return code.startswith("PA1") and code not in NOT_JUDGED


def compare(sites: Sequence[Site], reports: Iterable[Report]) -> Score:
    """Match every report to the site on its line; of several there, to the one whose column is nearest."""
    by_line: dict[tuple[str, str, int], list[Site]] = {}
    for site in sites:
        by_line.setdefault((site.package, site.file, site.line), []).append(site)
    codes: dict[Site, str] = {}
    raising: set[Site] = set()
    counts: dict[str, int] = {}
    unlabelled = 0
    for report in reports:
        here = by_line.get((report.package, report.file, report.line))
        nearest = min(here, key=lambda site: abs(site.column - report.column)) if here else None
        if report.code in NOT_JUDGED and nearest is not None:
            raising.add(nearest)
        if not judged(report.code):
            continue
        counts[report.code] = counts.get(report.code, 0) + 1
        if nearest is None:
            unlabelled += 1
        else:
            codes.setdefault(nearest, report.code)
    return Score(
        found=tuple(site for site in sites if site.leaks and site in codes),
        missed=tuple(site for site in sites if site.leaks and site not in codes),
        silent=tuple(site for site in sites if not site.leaks and site not in codes),
        alarms=tuple((site, codes[site]) for site in sites if not site.leaks and site in codes),
        unlabelled=unlabelled,
        codes=dict(sorted(counts.items())),
        raising=tuple(site for site in sites if site.leaks and site not in codes and site in raising),
    )


def check_package(root: Path, sites: Sequence[Site]) -> Path:
    """The folder of a package whose every labelled file is there, in the labelled version."""
    name, version = sites[0].package, sites[0].version
    folder = root / name
    missing = [path for path in (folder / site.file for site in sites) if not path.exists()]
    if missing or not _is_version(folder, name, version):
        wanted = missing[0] if missing else folder / f"{name}-{version}.dist-info"
        raise NotMeasured(
            f"{wanted} does not exist; unpack {name} {version} there:\n"
            f"    pip download --no-deps --only-binary=:all: --dest wheels {name}=={version}\n"
            f"    python -m zipfile -e wheels/{name}-{version}-*.whl {folder}"
        )
    return folder


def _is_version(folder: Path, name: str, version: str) -> bool:
    """A wheel's metadata are called after it; those of a source distribution say it."""
    wheels = {_plain(each.name.removesuffix(".dist-info")) for each in folder.glob("*.dist-info")}
    if _plain(f"{name}-{version}") in wheels:
        return True
    told = folder / "PKG-INFO"
    return told.is_file() and f"\nVersion: {version}\n" in told.read_text(encoding="utf-8", errors="replace")


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def audit(package: str, folder: Path, config: Path) -> Iterator[Report]:
    """Audit one unpacked package from inside its folder, so that paths are those of the wheel."""
    command = [sys.executable, "-m", "auditor.cli", "audit", ".", "--format", "json"]
    command += ["--no-cache", "--no-progress", "--config", str(config)]
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    try:
        run = json.loads(done.stdout)
    except ValueError:
        tail = done.stderr.strip().splitlines()[-5:]
        raise NotMeasured(
            "\n".join([f"the audit of {package} gave no JSON (status {done.returncode}):", *tail])
        ) from None
    yield from reports_of(package, run)


def reports_of(package: str, run: dict[str, Any]) -> Iterator[Report]:
    """The findings of a run in JSON version 1."""
    for finding in run["findings"]:
        yield Report(package, finding["path"], finding["line"], finding["column"], finding["code"])


def measure(sites: Sequence[Site], root: Path, config: Path) -> Score:
    """Audit every labelled package under `root` once and compare."""
    reports: list[Report] = []
    for package in sorted({site.package for site in sites}):
        own = [site for site in sites if site.package == package]
        reports += audit(package, check_package(root, own), config)
    return compare(sites, reports)


def as_text(score: Score, *, verbose: bool = False) -> str:
    """The score for people: totals, then every miss and every false alarm with the reason of its label."""
    found, alarms = len(score.found), len(score.alarms)
    leaks, correct = found + len(score.missed), alarms + len(score.silent)
    codes = ", ".join(f"{code} {count}" for code, count in score.codes.items()) or "no finding"
    lines = [
        f"true leaks found      {found}/{leaks} = {score.recall:.1%} (goal {RECALL_GOAL:.0%})",
        "  but for exceptions  {}/{}".format(*score.without_raises)
        + f"; of the missed {len(score.raising)} are told by PA103 or PA111",
        f"clean sites reported  {alarms}/{correct} = {score.false_rate:.1%} (goal {FALSE_RATE_GOAL:.0%})",
        "  judged before a run {}/{}".format(*score.blind),
        f"findings elsewhere    {score.unlabelled} (of all: {codes})",
    ]
    lines += [entry for site in score.missed for entry in _told("MISSED", site)]
    lines += [entry for site, code in score.alarms for entry in _told(f"FALSE {code}", site)]
    if verbose:
        lines += [entry for site in score.found for entry in _told("found", site)]
    return "\n".join(lines)


def _told(what: str, site: Site) -> tuple[str, str]:
    return f"{what}: {site.file}:{site.line} {site.text} [{site.protocol}]", f"    {site.reason}"


def as_json(score: Score) -> str:
    """The score for programs."""
    table = {
        "recall": score.recall,
        "false_rate": score.false_rate,
        "blind": score.blind,
        "good": score.good,
        "found": len(score.found),
        "missed": [asdict(site) for site in score.missed],
        "silent": len(score.silent),
        "alarms": [{"code": code, **asdict(site)} for site, code in score.alarms],
        "unlabelled": score.unlabelled,
        "codes": score.codes,
        "without_raises": score.without_raises,
        "raising": len(score.raising),
    }
    return json.dumps(table, indent=2, ensure_ascii=False)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, required=True, help="folder with one unpacked wheel per package")
    parser.add_argument("--package", action="append", help="score this package only; repeatable")
    parser.add_argument("--labels", type=Path, default=HERE / "labels.json")
    parser.add_argument("--config", type=Path, default=HERE / "protocols.toml", help="settings of the audit")
    parser.add_argument("--json", action="store_true", help="print the score as JSON")
    parser.add_argument("--verbose", action="store_true", help="list what was found as well")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the score; the exit status says whether both goals are reached."""
    chosen = _arguments(arguments)
    sites = read_labels(chosen.labels)
    unknown = set(chosen.package or ()) - {site.package for site in sites}
    try:
        if unknown:
            raise NotMeasured(f"no labels for {', '.join(sorted(unknown))} in {chosen.labels}")
        sites = tuple(site for site in sites if not chosen.package or site.package in chosen.package)
        score = measure(sites, chosen.root.resolve(), chosen.config.resolve())
    except NotMeasured as problem:
        print(f"score: {problem}", file=sys.stderr)
        return 2
    print(as_json(score) if chosen.json else as_text(score, verbose=chosen.verbose))
    return 0 if score.good else 1


if __name__ == "__main__":
    sys.exit(main())
