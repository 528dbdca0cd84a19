"""The picture of an editor shows a real one, and nothing on a terminal can be markup in a page."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("pygls", reason="the extra `server` is not installed")

from docs import editor_view, terminal_view

LEAK = """\
def load(pool, skip):
    buf = pool.acquire("<b>")
    if skip:
        return
    pool.release(buf)
"""


def new_enough() -> bool:
    if not (shutil.which("nvim") and shutil.which("tmux")):
        return False
    said = subprocess.run(["nvim", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.match(r"NVIM v(\d+)\.(\d+)", said)
    return found is not None and (int(found[1]), int(found[2])) >= (0, 11)


@pytest.mark.skipif(not new_enough(), reason="needs tmux and Neovim 0.11 or newer")
def test_neovim_shows_a_finding_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "leak.py").write_text(LEAK)
    screen = terminal_view.SEQUENCE.sub("", editor_view.screen(tmp_path, "leak.py", 2))
    for said in ("[PA102]", "leak.py:2:11: acquired here", "leak.py:4:9: returns here, still holding it"):
        assert said in screen


def test_the_settings_are_those_of_the_documentation() -> None:
    assert editor_view.settings().startswith(
        'vim.lsp.config("poolaudit", {\n  cmd = { "poolaudit", "server" },\n'
    )
    assert editor_view.settings().rstrip().endswith('vim.lsp.enable("poolaudit")')


def test_what_a_terminal_shows_is_text_with_its_colours() -> None:
    page = terminal_view.page("plain <b> \x1b[1;31mred\x1b[0m \x1b[38;2;1;2;3;48;5;16mdeep\x1b[39;49m end")
    assert "plain &lt;b&gt; " in page
    assert '<span style="font-weight:700;color:#ff8a80">red</span>' in page
    assert '<span style="color:#010203;background:#000000">deep</span> end' in page
