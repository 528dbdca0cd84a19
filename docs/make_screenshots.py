"""Make docs/screenshots anew: `python docs/make_screenshots.py [TREE]`, by default of the example.

Needs Chromium and the extra `server`. The HTML report light, dark, narrow and with a finding open, the
terminal's output, and an editor's window, each as a PNG. In the report's curve the runs before the last one
are made up; the editor is drawn by editor_view.py from the server's answers.
"""

import html
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from docs import editor_view  # noqa: E402 - needs the path above
from tests.browser import Browser  # noqa: E402

SHOTS = ROOT / "docs" / "screenshots"
OPEN_FIRST = "document.querySelector('#finding-list .head').click()"
TERMINAL = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; padding: 1.2rem 1.5rem; background: #14171c; color: #d8dce3; }}
pre {{ margin: 0; font: 14px/1.4 ui-monospace, "DejaVu Sans Mono", monospace; }}
.b {{ font-weight: 700; }} .d {{ color: #8d96a5; }} .c31 {{ color: #ff8a80; }} .c32 {{ color: #5fc389; }}
.c33 {{ color: #f2bd63; }} .c34, .c36 {{ color: #8ab4ff; }}
</style><pre>{text}</pre>"""


EARLIER = "".join(
    f'{{"time":"2026-{month:02}-01T08:00:00Z","files":{files},"lines":{60 * files},"errors":{errors},'
    f'"warnings":{warnings},"infos":0,"failures":0,"full":{full},"partial":3,"none":2}}\n'
    for month, files, errors, warnings, full in (
        (5, 9, 14, 6, 2), (6, 11, 15, 8, 3), (7, 13, 11, 8, 4), (8, 14, 11, 5, 6), (9, 16, 8, 6, 7),
    )
)  # fmt: skip


@dataclass(frozen=True)
class Shot:
    name: str
    width: int
    height: int
    dark: bool = False
    script: str = ""


SHOTS_OF_THE_PAGE = (
    Shot("light", 1280, 1180, script=OPEN_FIRST),
    Shot("dark", 1280, 1180, dark=True, script="document.getElementById('recommendations').scrollIntoView()"),
    Shot("finding", 1280, 1180, script=f"{OPEN_FIRST}; document.getElementById('findings').scrollIntoView()"),
    Shot("narrow", 400, 1180, script=f"{OPEN_FIRST}; document.getElementById('findings').scrollIntoView()"),
)


def audit(tree: Path, *options: str) -> str:
    """What `poolaudit audit` prints of `tree`, beside which the working directory is."""
    command = [
        sys.executable,
        "-m",
        "auditor.cli",
        "audit",
        tree.name,
        "--isolated",
        "--no-cache",
        "--no-progress",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    done = subprocess.run(
        [*command, "--exit-zero", *options],
        cwd=tree.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        check=True, text=True,
    )  # fmt: skip
    return done.stdout


def worst(tree: Path) -> str:
    """The file, below `tree`, of the first error with a path of several stations."""
    findings = json.loads(audit(tree, "--format", "json", "--quiet"))["findings"]
    chosen = next(
        each for each in findings if each["severity"] == "error" and len(each["trace"]) > 2 and each["fix"]
    )
    return str(Path(chosen["path"]).relative_to(tree.name))


def colored(text: str) -> str:
    """Terminal colours as spans: the few that the reports use."""
    pieces = html.escape(text).split("\x1b[")
    shown = [pieces[0]]
    for piece in pieces[1:]:
        codes, _, rest = piece.partition("m")
        names = {"1": "b", "2": "d"}
        classes = " ".join(names.get(code, f"c{code}") for code in codes.split(";") if code not in ("", "0"))
        shown.append(f'<span class="{classes}">{rest}</span>')
    return "".join(shown)


def main(tree: Path) -> None:
    SHOTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        page = Path(folder) / "report.html"
        history = Path(folder) / "history.jsonl"
        history.write_text(EARLIER, encoding="utf-8")
        audit(tree, "--history", str(history), "--output", f"html={page}")
        for shot in SHOTS_OF_THE_PAGE:
            browser.resize(shot.width, shot.height, dark=shot.dark)
            browser.open(page)
            browser.run(shot.script)
            browser.screenshot(SHOTS / f"{shot.name}.png")
        text = audit(tree, "--color", "always", "--select", "PA102,PA109")
        whole = {
            "terminal": TERMINAL.format(text=colored(text)),
            "editor": editor_view.page(tree, worst(tree)),
        }
        for name, content in whole.items():
            window = Path(folder) / f"{name}.html"
            window.write_text(content, encoding="utf-8")
            browser.resize(1000, 300)
            browser.open(window)
            browser.resize(1000, int(browser.run("document.documentElement.scrollHeight")))
            browser.screenshot(SHOTS / f"{name}.png")
        assert browser.complaints == [], browser.complaints


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "examples" / "longdoc")
