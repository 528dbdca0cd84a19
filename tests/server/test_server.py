"""`poolaudit server` as an editor uses it: a process, messages in, messages out."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pygls", reason="the extra `server` is not installed")

from tests.fixes.test_taken_out import FINISH, FINISHED, POOLS, STAGE, TABLE, USED
from tests.server.client import Client, Message

pytestmark = pytest.mark.timeout(300)

LEAK = """\
def load(pool, skip):
    buf = pool.acquire(8)
    if skip:
        return
    pool.release(buf)
"""
CLEAN = "def load(pool, x):\n    with pool.lease(8) as buf:\n        buf.copy_(x)\n        return buf.sum()\n"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    client = Client(tmp_path)
    yield client
    client.kill()


def codes(diagnostics: list[Message]) -> list[tuple[str, int]]:
    """Code and line, counted from 1, of each."""
    return [(shown["code"], shown["range"]["start"]["line"] + 1) for shown in diagnostics]


def applied(text: str, edits: list[Message]) -> str:
    """The text after edits that do not overlap; ASCII lines only."""
    lines = text.splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines) + 1)]
    for edit in sorted(edits, key=lambda edit: -edit["range"]["start"]["line"]):
        start, end = (
            starts[at["line"]] + at["character"] for at in (edit["range"]["start"], edit["range"]["end"])
        )
        text = text[:start] + edit["newText"] + text[end:]
    return text


def test_files_on_disk_are_diagnosed_with_their_path_and_taken_back_when_mended(client: Client) -> None:
    (client.root / "leak.py").write_text(LEAK)
    answer = client.initialize()
    assert answer["serverInfo"]["name"] == "poolaudit"
    (shown,) = client.diagnostics("leak.py")
    assert (shown["code"], shown["source"], shown["severity"]) == ("PA102", "poolaudit", 1)
    assert shown["range"] == {"start": {"line": 1, "character": 10}, "end": {"line": 1, "character": 25}}
    steps = [
        (step["location"]["range"]["start"]["line"], step["message"]) for step in shown["relatedInformation"]
    ]
    assert steps == [
        (1, "acquired here"),
        (2, "when `skip`"),
        (3, "returns here, still holding it"),
    ]
    (client.root / "leak.py").write_text(CLEAN)
    client.notify("workspace/didChangeWatchedFiles", {"changes": [{"uri": client.uri("leak.py"), "type": 2}]})
    assert client.diagnostics("leak.py") == []
    assert client.shutdown() == 0
    assert client.requested == ["client/registerCapability"]


def test_unsaved_text_counts_instead_of_the_file(client: Client) -> None:
    (client.root / "code.py").write_text(CLEAN)
    client.initialize()
    client.open("code.py", CLEAN, 1)
    client.change("code.py", LEAK, 2)
    assert codes(client.diagnostics("code.py", 2)) == [("PA102", 2)]
    client.change("code.py", "\n\n" + LEAK, 3)
    assert codes(client.diagnostics("code.py", 3)) == [("PA102", 4)]
    client.close("code.py")
    assert client.diagnostics("code.py") == []  # the file itself is clean
    assert (client.root / "code.py").read_text() == CLEAN


def test_a_new_file_is_audited_before_it_is_saved_and_an_excluded_one_never(client: Client) -> None:
    (client.root / "poolaudit.toml").write_text('exclude = ["generated/"]\n')
    (client.root / "generated").mkdir()
    (client.root / "generated" / "code.py").write_text(LEAK)
    client.initialize()
    client.open("generated/code.py", LEAK)
    client.open("new.py", LEAK)
    assert codes(client.diagnostics("new.py", 1)) == [("PA102", 2)]
    client.close("generated/code.py")
    client.close("new.py")
    assert client.diagnostics("new.py") == []
    assert all("generated" not in json.dumps(message) for message in client.seen)


def test_a_pool_in_another_file_is_understood(client: Client) -> None:
    """The pair is defined in an open, unsaved document; its user on disk follows it."""
    pool = "class Slots:\n    def __init__(self):\n        self.free = list(range(8))\n\n"
    pool += "    def {take}_slot(self):\n        return self.free.pop()\n\n"
    pool += "    def free_slot(self, slot):\n        self.free.append(slot)\n"
    user = "from slots import Slots\n\n\ndef use(n):\n    slots = Slots()\n    slot = slots.alloc_slot()\n"
    user += "    if n:\n        return\n    slots.free_slot(slot)\n"
    (client.root / "slots.py").write_text(pool.format(take="other"))
    (client.root / "user.py").write_text(user)
    client.initialize()
    client.open("slots.py", pool.format(take="other"))
    client.change("slots.py", pool.format(take="alloc"), 2)
    assert codes(client.diagnostics("user.py")) == [("PA102", 6)]


def test_columns_are_utf16_units(client: Client) -> None:
    client.initialize()
    client.open("wide.py", 'def f(pool):\n    x = "🙂é"; pool.acquire(1)\n')
    (shown,) = client.diagnostics("wide.py", 1)
    assert shown["code"] == "PA104"
    assert shown["range"]["start"] == {"line": 1, "character": 15}


def test_a_fix_is_offered_and_mends_the_text(client: Client) -> None:
    client.initialize()
    client.open("leak.py", LEAK)
    (shown,) = client.diagnostics("leak.py", 1)
    fix, ignore = client.actions("leak.py", shown)
    assert (fix["kind"], fix["isPreferred"]) == ("quickfix", True)
    mended = applied(LEAK, fix["edit"]["changes"][client.uri("leak.py")])
    assert mended.count("pool.release(buf)") == 1 and "finally:" in mended
    client.change("leak.py", mended, 2)
    assert client.diagnostics("leak.py", 2) == []
    client.change("leak.py", LEAK, 3)
    assert codes(client.diagnostics("leak.py", 3)) == [("PA102", 2)]
    assert ignore["title"] == "PA102: ignore on this line"
    silenced = applied(LEAK, ignore["edit"]["changes"][client.uri("leak.py")])
    assert silenced.splitlines()[1] == "    # poolaudit: ignore[PA102]"
    client.change("leak.py", silenced, 4)
    assert client.diagnostics("leak.py", 4) == []


def test_no_action_on_text_that_was_not_audited_yet(client: Client) -> None:
    """Its positions would be those of an older text."""
    client.initialize()
    client.open("leak.py", LEAK)
    (shown,) = client.diagnostics("leak.py", 1)
    client.change("leak.py", "# another line\n" + LEAK, 2)
    assert client.actions("leak.py", shown) == []
    assert client.request("textDocument/hover", client.at("leak.py", 1, 12)) is None


def test_a_fix_in_another_document_is_offered_while_that_is_as_it_was_audited(client: Client) -> None:
    client.initialize()
    base = "from pools import Pool\n\n\n" + TABLE + FINISH
    client.open("pools.py", POOLS + USED)
    client.open("base.py", base)
    client.open("staged.py", "from base import Table\n\n\nclass Staged(Table):\n" + STAGE)
    (shown,) = client.diagnostics("staged.py", 1)
    fix, ignore = client.actions("staged.py", shown)
    assert list(fix["edit"]["changes"]) == [client.uri("base.py")]
    assert applied(base, fix["edit"]["changes"][client.uri("base.py")]).endswith(FINISHED)
    client.change("base.py", "# pools\n" + base, 2)
    assert client.actions("staged.py", shown) == [ignore]


def test_hovering_over_a_finding_shows_the_page_of_its_rule(client: Client) -> None:
    client.initialize()
    client.open("leak.py", LEAK)
    assert codes(client.diagnostics("leak.py", 1)) == [("PA102", 2)]
    hover = client.request("textDocument/hover", client.at("leak.py", 1, 12))
    assert hover["contents"]["kind"] == "markdown"
    assert hover["contents"]["value"].startswith("PA102 early-exit-leak: ")
    path = "1. line 2: acquired here\n2. line 3: when `skip`\n3. line 4: returns here, still holding it\n"
    assert path in hover["contents"]["value"]
    assert "**Bad**\n\n```python\ndef load" in hover["contents"]["value"]
    assert client.request("textDocument/hover", client.at("leak.py", 3, 2)) is None


def test_a_document_with_a_syntax_error_keeps_what_was_found_and_says_so(client: Client) -> None:
    client.initialize()
    client.open("leak.py", LEAK)
    assert codes(client.diagnostics("leak.py", 1)) == [("PA102", 2)]
    client.change("leak.py", LEAK + "def half(", 2)
    leak, broken = client.diagnostics("leak.py", 2)
    assert leak["code"] == "PA102"
    assert (
        broken["message"].startswith("not analysed: invalid syntax") and broken["range"]["start"]["line"] == 5
    )
    client.change("leak.py", LEAK, 3)
    assert codes(client.diagnostics("leak.py", 3)) == [("PA102", 2)]


def test_settings_are_read_again_and_wrong_ones_are_told(client: Client) -> None:
    settings = client.root / "poolaudit.toml"
    (client.root / "leak.py").write_text(LEAK)
    client.initialize()
    assert codes(client.diagnostics("leak.py")) == [("PA102", 2)]
    changed = {"changes": [{"uri": client.uri("poolaudit.toml"), "type": 2}]}
    settings.write_text('ignore = ["PA102"]\n')
    client.notify("workspace/didChangeWatchedFiles", changed)
    assert client.diagnostics("leak.py") == []
    settings.write_text('ignroe = ["PA102"]\n')
    client.notify("workspace/didChangeWatchedFiles", changed)
    assert "ignroe" in client.message()
    settings.write_text("")
    client.notify("workspace/didChangeWatchedFiles", changed)
    assert codes(client.diagnostics("leak.py")) == [("PA102", 2)]


def test_bad_files_and_bad_messages_do_not_end_the_server(client: Client) -> None:
    (client.root / "null.py").write_bytes(b"pool.acquire(1)\0\n")
    (client.root / "bytes.py").write_bytes(b"pool.acquire('\xff')\n")
    (client.root / "loop.py").symlink_to("loop.py")
    (client.root / "leak.py").write_text(LEAK)
    client.initialize()
    (shown,) = client.diagnostics("null.py")
    assert shown["message"] == "not analysed: contains a null byte"
    assert [shown["severity"] for shown in client.diagnostics("bytes.py")] == [2]
    client.raw(b"Content-Length: 9\r\n\r\nnot json!")
    client.raw(b"Content-Length: 2\r\n\r\n[]")
    client.raw(b"Nonsense: header\r\n\r\n")
    client.notify("textDocument/didChange", {"textDocument": {"uri": 3}})
    client.notify("no/such/thing", {})
    client.send({"id": 999, "method": "no/such/request", "params": {}})
    refused = client.wait(lambda message: message.get("id") == 999)
    assert refused["error"]["code"] == -32601
    client.notify(
        "textDocument/didOpen",
        {"textDocument": {"uri": "untitled:1", "languageId": "python", "version": 1, "text": LEAK}},
    )
    client.open("deep.py", "pool.acquire(" + "(" * 3000 + ")" * 3000 + ")\n")
    (deep,) = client.diagnostics("deep.py", 1)
    assert deep["message"].startswith("not analysed: ")
    client.open("leak.py", "\n" + LEAK)
    assert codes(client.diagnostics("leak.py", 1)) == [("PA102", 3)]
    assert client.shutdown() == 0


def test_an_audit_that_is_killed_is_told_and_started_again(client: Client) -> None:
    client.initialize()
    client.open("leak.py", LEAK)
    assert codes(client.diagnostics("leak.py", 1)) == [("PA102", 2)]
    (analyst,) = _children(client.process.pid)
    os.kill(analyst, signal.SIGKILL)
    client.change("leak.py", LEAK + "\n", 2)
    assert "the audit ended unexpectedly (exit code -9)" in client.message()
    client.change("leak.py", "\n" + LEAK, 3)
    assert codes(client.diagnostics("leak.py", 3)) == [("PA102", 3)]


def test_a_lone_file_is_audited_without_a_workspace(client: Client) -> None:
    (client.root / "leak.py").write_text(LEAK)
    (client.root / "other.py").write_text(LEAK)
    client.initialize(folders=False)
    client.open("leak.py", LEAK)
    assert codes(client.diagnostics("leak.py")) == [("PA102", 2)]
    client.close("leak.py")
    assert client.diagnostics("leak.py") == []
    assert all("other.py" not in json.dumps(message) for message in client.seen)


def test_nothing_is_left_behind_when_the_editor_dies(client: Client) -> None:
    client.initialize()
    client.open("leak.py", LEAK)
    assert client.diagnostics("leak.py", 1)
    (analyst,) = _children(client.process.pid)
    assert client.process.stdin is not None
    client.process.stdin.close()
    client.process.wait(60)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{analyst}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{analyst}").exists()


def _children(pid: int) -> list[int]:
    """The processes that the server started, but for the one that tracks shared memory."""
    found = Path(f"/proc/{pid}/task/{pid}/children")
    if not found.exists():
        pytest.skip("needs /proc/PID/task/PID/children")
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for file in threads for child in file.read_text().split()]
    return [c for c in children if "resource_tracker" not in Path(f"/proc/{c}/cmdline").read_text()]
