"""A real editor's screen, for make_screenshots.py: Neovim with the settings of docs/editors.md, inside tmux.

Needs `nvim` (0.11 or newer) and `tmux` on the PATH. Nothing on the screen is ours but the file and the
answers of `poolaudit server`.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
COLUMNS, ROWS = 112, 34
PATIENCE = 60.0
SETTINGS = re.compile(r"^## Neovim.*?\n\n((?:    .*\n|\n)+)", re.MULTILINE)
LOOKS = """
vim.diagnostic.config({ virtual_text = false, float = { border = "single" } })
vim.o.termguicolors, vim.o.number, vim.o.signcolumn, vim.o.laststatus = true, true, "yes", 2
vim.o.shadafile, vim.o.swapfile = "NONE", false
"""


def settings() -> str:
    """What docs/editors.md tells a user of Neovim to write."""
    found = SETTINGS.search((ROOT / "docs" / "editors.md").read_text(encoding="utf-8"))
    assert found, "docs/editors.md has no settings for Neovim"
    return "".join(f"{line[4:]}\n" for line in found[1].splitlines())


def screen(tree: Path, name: str, line: int) -> str:
    """The screen, colours and all, with `name` of `tree` open and the finding of `line` unfolded."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder).resolve()
        work = home / tree.name
        shutil.copytree(tree, work, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        (work / "poolaudit.toml").touch()
        (home / "init.lua").write_text(settings() + LOOKS, encoding="utf-8")
        with _terminal(home, work, ["nvim", "-u", str(home / "init.lua"), f"+{line}", name]) as terminal:
            terminal.until(lambda shown: re.search(r"^ ?E ", shown, re.MULTILINE) is not None)
            terminal.type("zt", "8", "C-y", ":lua vim.diagnostic.open_float()", "Enter")
            terminal.until(lambda shown: "acquired here" in shown)
            return terminal.shown(colors=True)


class _Terminal:
    def __init__(self, socket: Path) -> None:
        self._tmux = ["tmux", "-S", str(socket), "-f", "/dev/null"]

    def tmux(self, *arguments: str) -> str:
        done = subprocess.run([*self._tmux, *arguments], check=True, capture_output=True, text=True)
        return done.stdout

    def type(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def shown(self, *, colors: bool = False) -> str:
        return self.tmux("capture-pane", "-p", *(["-e"] if colors else []))

    def until(self, there: Callable[[str], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not there(self.shown()):
            if time.monotonic() > end:
                raise TimeoutError(self.shown())
            time.sleep(0.2)


@contextmanager
def _terminal(home: Path, work: Path, command: list[str]) -> Iterator[_Terminal]:
    """A tmux server of its own, in which `poolaudit` is this tree's."""
    tool = home / "poolaudit"
    tool.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m auditor.cli "$@"\n')
    tool.chmod(0o755)
    terminal = _Terminal(home / "tmux")
    path = f"PATH={home}{os.pathsep}{os.environ['PATH']}"
    size = ["-x", str(COLUMNS), "-y", str(ROWS)]
    environment = ["env", path, f"HOME={home}", "COLORTERM=truecolor", "LANG=C.UTF-8"]
    terminal.tmux("new-session", "-d", *size, "-c", str(work), *environment, *command)
    try:
        yield terminal
    finally:
        terminal.tmux("kill-server")
