"""One self-contained page for people who would rather look: no network, no files beside it.

Everything of the audited code goes through one of two doors: jinja's escaping, or JSON that the page's own
script puts into text nodes. The content security policy lets no other script run.
"""

import base64
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from auditor.model import Failure, Run, Severity
from reports import _html_charts, _recommend, _rule_page
from reports._estimate import ASSUMED
from reports._html_data import data, short, visible

SHOWS_EFFORT = True
HERE = Path(__file__).parent
SCRIPTS = ("page.js", "lazy_list.js", "source_view.js", "findings.js", "classes.js", "keys.js")
CURVE = (760, 180)
MOST_ADVICE = 60


def render(run: Run, *, color: bool, width: int) -> str:
    """The page. Rows of findings and classes are made by its script as they come into sight."""
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = visible
    environment.filters["short"] = short
    environment.filters["number"] = "{:,}".format
    package = _html_charts.packages(run)
    bars, further = _html_charts.by_package(run.classes, package)
    script = "\n".join(_static(name) for name in SCRIPTS)
    return environment.get_template("page.html").render(
        run=run,
        total=run.summary,
        severities=_severities(run),
        rules=_rule_page.shown(run),
        page=_rule_page,
        not_followed=_by_reason(run.unfollowed),
        support=_html_charts.support(run.classes),
        bars=bars,
        advice=_recommend.recommendations(run),
        most_advice=MOST_ADVICE,
        nothing_to_edit=_recommend.nothing_to_edit(run),
        assumed=ASSUMED,
        further_packages=further,
        curves=_html_charts.curves(run.history, *CURVE) if len(run.history) > 1 else [],
        highest=_html_charts.highest(run.history),
        curve_size=CURVE,
        style=Markup(_static("page.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=Markup(data(run, package)),
    )


def _static(name: str) -> str:
    return (HERE / "static" / name).read_text(encoding="utf-8").strip()


def _severities(run: Run) -> dict[str, int]:
    found = Counter(finding.severity for finding in run.findings)
    return {kind.value: found[kind] for kind in Severity}


def _by_reason(unfollowed: Iterable[Failure]) -> list[tuple[str, list[Failure]]]:
    """Acquires given up on, the most frequent reason first."""
    reasons: defaultdict[str, list[Failure]] = defaultdict(list)
    for failure in unfollowed:
        reasons[failure.message].append(failure)
    return sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0]))
