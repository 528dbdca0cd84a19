"""Make docs/screenshots anew: `python docs/make_screenshots.py [TREE]`, by default of the example.

Needs Chromium, tmux, Neovim 0.11 or newer and the extra `server`. The HTML report light, dark, narrow and
with a finding open, the terminal's output, and an editor, each as a PNG. In the report's curve the runs
before the last one are made up; the editor is Neovim with the settings of docs/editors.md (editor_view.py).
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from docs import editor_view, terminal_view  # noqa: E402 - needs the path above
from tests.browser import Browser  # noqa: E402

SHOTS = ROOT / "docs" / "screenshots"
OPEN_FIRST = "document.querySelector('#finding-list .head').click()"
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


def worst(tree: Path) -> tuple[str, int]:
    """File, below `tree`, and line of the first error with a path of several stations."""
    findings = json.loads(audit(tree, "--format", "json", "--quiet"))["findings"]
    chosen = next(
        each for each in findings if each["severity"] == "error" and len(each["trace"]) > 2 and each["fix"]
    )
    return str(Path(chosen["path"]).relative_to(tree.name)), chosen["line"]


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
            "terminal": terminal_view.page(text),
            "editor": terminal_view.page(editor_view.screen(tree, *worst(tree)), leading=1.25),
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
