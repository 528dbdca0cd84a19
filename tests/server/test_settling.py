"""On a tree that takes a while: a first answer soon, and in the end what `poolaudit audit` says."""

import queue
import shutil
import time
from pathlib import Path

import pytest

pytest.importorskip("pygls", reason="the extra `server` is not installed")

from tests.command_line import poolaudit
from tests.server.client import PROJECT, Client

Shown = tuple[str, str, int, int, str]
FIXTURES = PROJECT / "tests" / "fixtures"


def audited(root: Path) -> set[Shown]:
    findings = poolaudit("audit", ".", "--format", "json", "--no-cache", cwd=root).json["findings"]
    return {(f["path"], f["code"], f["line"], f["column"], f["message"]) for f in findings}


def published(client: Client) -> set[Shown]:
    """What an editor shows by now."""
    while True:
        try:
            message = client._messages.get(timeout=0.1)
        except queue.Empty:
            break
        assert message is not None, client.errors
        client.seen.append(message)
    last = {
        message["params"]["uri"].removeprefix(client.root.as_uri() + "/"): message["params"]["diagnostics"]
        for message in client.seen
        if message.get("method") == "textDocument/publishDiagnostics"
    }
    return {
        (name, d["code"], d["range"]["start"]["line"] + 1, d["range"]["start"]["character"] + 1, d["message"])
        for name, diagnostics in last.items()
        for d in diagnostics
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_diagnostics_settle_to_what_an_audit_says(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "flow", tmp_path / "flow")
    (tmp_path / "rules").mkdir()
    for source in sorted(FIXTURES.glob("rules/pa*.py"))[::15]:  # enough to be slower than the edits are
        shutil.copy(source, tmp_path / "rules")
    shutil.copy(FIXTURES / "rules/pa102_early_exit.py", tmp_path / "rules")
    name = "rules/pa102_early_exit.py"
    text = (tmp_path / name).read_text()
    client = Client(tmp_path)
    try:
        client.initialize()
        client.open(name, text, 1)
        client.diagnostics(name)
        for version in range(2, 8):  # faster than any audit of the whole tree
            client.change(name, "# typed\n" * version + text, version)
            time.sleep(0.3)
        first = client.diagnostics(name, 7)
        (tmp_path / name).write_text("# typed\n" * 7 + text)
        client.notify("textDocument/didSave", {"textDocument": {"uri": client.uri(name)}})
        wanted = audited(tmp_path)
        deadline = time.monotonic() + 120
        while published(client) != wanted and time.monotonic() < deadline:
            time.sleep(0.2)
        assert published(client) == wanted
        here = [each for each in wanted if each[0] == name]
        assert len(here) > 10
        assert len(first) == len(here)
        assert client.shutdown() == 0
    finally:
        client.kill()
