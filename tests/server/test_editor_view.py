"""The picture of an editor shows what the server answers, and nothing of the file can be markup in it."""

from pathlib import Path

import pytest

pytest.importorskip("pygls", reason="the extra `server` is not installed")

from docs import editor_view

LEAK = """\
def load(pool, skip):
    buf = pool.acquire("<b>")
    if skip:
        return
    pool.release(buf)
"""


def test_diagnostics_stations_and_actions_are_drawn(tmp_path: Path) -> None:
    (tmp_path / "leak.py").write_text(LEAK)
    page = editor_view.page(tmp_path, "leak.py")
    assert '<span class="severity1">pool.acquire(&quot;&lt;b&gt;&quot;)</span>' in page
    assert 'acquired here <span class="dim">leak.py [2, 11]</span>' in page
    assert 'returns here, still holding it <span class="dim">leak.py [4, 9]</span>' in page
    assert "<div>PA102: ignore on this line</div>" in page
    assert "<b>&quot;" not in page
    assert '"<b>"' not in page
