"""An editor's window drawn from what `poolaudit server` really says of a file; used by make_screenshots.py.

Every diagnostic, station and code action in it is an answer of the server. The frame around them is ours.
"""

import html
import shutil
import tempfile
from pathlib import Path
from string import Template
from typing import Any

from tests.server.client import Client

Message = dict[str, Any]
AROUND = 12  # lines on show before and after the diagnostics
FRAME = Template((Path(__file__).parent / "editor_view.html").read_text(encoding="utf-8"))


def page(tree: Path, name: str) -> str:
    """The window with `name` of `tree` open, its first finding's code actions unfolded."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve() / tree.name
        shutil.copytree(tree, root, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        client = Client(root)
        try:
            client.initialize()
            text = (root / name).read_text(encoding="utf-8")
            client.open(name, text)
            shown = client.diagnostics(name, 1)
            actions = [action["title"] for action in client.actions(name, shown[0])]
            client.shutdown()
        finally:
            client.kill()
    return FRAME.substitute(
        name=html.escape(name), code=_code(text, shown, actions), problems=_problems(shown, root)
    )


def _code(text: str, shown: list[Message], actions: list[str]) -> str:
    lines = text.split("\n")
    starts = [each["range"]["start"]["line"] for each in shown]
    rows = []
    for number in range(max(min(starts) - AROUND // 2, 0), min(max(starts) + AROUND, len(lines))):
        rows.append(
            _line(number, lines[number], [each for each in shown if each["range"]["start"]["line"] == number])
        )
        if number == starts[0]:
            rows.append(
                f'<div class="menu">{"".join(f"<div>{html.escape(title)}</div>" for title in actions)}</div>'
            )
    return "".join(rows)


def _line(number: int, line: str, here: list[Message]) -> str:
    """The first diagnostic that begins in the line is underlined; the example is ASCII, so columns agree."""
    margin = f'<span class="number">{number + 1}</span>'
    if not here:
        return f'<div class="line">{margin}{html.escape(line)}</div>'
    first = here[0]
    start, end = first["range"]["start"]["character"], first["range"]["end"]
    until = end["character"] if end["line"] == number else len(line)
    marked = f'<span class="severity{first["severity"]}">{html.escape(line[start:until])}</span>'
    beside = f'<span class="beside">{first["code"]}</span>'
    before, after = html.escape(line[:start]), html.escape(line[until:])
    return f'<div class="line">{margin}{before}{marked}{after}{beside}</div>'


def _problems(shown: list[Message], root: Path) -> str:
    rows = []
    for each in shown:
        at = each["range"]["start"]
        place = f"[{at['line'] + 1}, {at['character'] + 1}]"
        rows.append(
            f'<div class="problem"><b>●</b> {html.escape(each["message"])}'
            f' <span class="dim">{each["source"]}({each["code"]}) {place}</span></div>'
        )
        for station in each.get("relatedInformation", ()):
            uri, start = station["location"]["uri"], station["location"]["range"]["start"]
            place = f"{uri.removeprefix(root.as_uri() + '/')} [{start['line'] + 1}, {start['character'] + 1}]"
            said = f'{html.escape(station["message"])} <span class="dim">{html.escape(place)}</span>'
            rows.append(f'<div class="station">{said}</div>')
    return "".join(rows)
