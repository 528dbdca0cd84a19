"""A language client of our own: JSON-RPC over the server's standard streams, nothing of pygls."""

import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parent.parent.parent
PATIENCE = 120.0
"""Seconds until a message counts as never sent; on an idle machine they come at once."""

Message = dict[str, Any]
CAPABILITIES = {
    "workspace": {"didChangeWatchedFiles": {"dynamicRegistration": True}},
    "textDocument": {"publishDiagnostics": {"relatedInformation": True, "versionSupport": True}},
}


class Client:
    """Starts the server in `root`. Requests it makes of us are answered with null."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.process = subprocess.Popen(
            [sys.executable, "-m", "auditor.cli", "server"],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(PROJECT)},
        )
        self.requested: list[str] = []  # methods that the server called
        self.errors = b""
        self.seen: list[Message] = []  # everything that came, in order
        self._messages: queue.Queue[Message | None] = queue.Queue()
        self._aside: list[Message] = []
        self._number = 0
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_errors, daemon=True).start()

    # The wire -----------------------------------------------------------------------------------------------

    def raw(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def send(self, message: Message) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.raw(b"Content-Length: %d\r\n\r\n" % len(body) + body)

    def notify(self, method: str, params: Any) -> None:
        self.send({"method": method, "params": params})

    def request(self, method: str, params: Any = None) -> Any:
        self._number += 1
        self.send({"id": self._number, "method": method, "params": params})
        number = self._number
        answer = self.wait(lambda message: message.get("id") == number and "method" not in message)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def wait(self, wanted: Any) -> Message:
        """The first message that `wanted` accepts; the others stay for later."""
        for earlier in self._aside:
            if wanted(earlier):
                self._aside.remove(earlier)
                return earlier
        while True:
            message = self._messages.get(timeout=PATIENCE)
            assert message is not None, f"the server ended: {self.errors.decode(errors='replace')}"
            self.seen.append(message)
            if "id" in message and "method" in message:
                self.requested.append(message["method"])
                self.send({"id": message["id"], "result": None})
            elif wanted(message):
                return message
            else:
                self._aside.append(message)

    def _read(self) -> None:
        stream = self.process.stdout
        assert stream is not None
        while True:
            length = 0
            while (header := stream.readline()) not in (b"\r\n", b""):
                if header.lower().startswith(b"content-length:"):
                    length = int(header.split(b":")[1])
            if not header:
                self._messages.put(None)
                return
            self._messages.put(json.loads(stream.read(length)))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors = self.process.stderr.read()

    # The protocol -------------------------------------------------------------------------------------------

    def initialize(self, *, folders: bool = True) -> Message:
        named = [{"uri": self.root.as_uri(), "name": "root"}] if folders else None
        params = {"processId": os.getpid(), "rootUri": None, "workspaceFolders": named}
        answer: Message = self.request("initialize", {**params, "capabilities": CAPABILITIES})
        self.notify("initialized", {})
        return answer

    def uri(self, name: str) -> str:
        return (self.root / name).as_uri()

    def open(self, name: str, text: str, version: int = 1) -> None:
        document = {"uri": self.uri(name), "languageId": "python", "version": version, "text": text}
        self.notify("textDocument/didOpen", {"textDocument": document})

    def change(self, name: str, text: str, version: int) -> None:
        """The whole document at once."""
        document = {"uri": self.uri(name), "version": version}
        self.notify("textDocument/didChange", {"textDocument": document, "contentChanges": [{"text": text}]})

    def close(self, name: str) -> None:
        self.notify("textDocument/didClose", {"textDocument": {"uri": self.uri(name)}})

    def diagnostics(self, name: str, version: int | None = None) -> list[Message]:
        """The next ones published for a file, of that version if one is named."""
        uri = self.uri(name)

        def wanted(message: Message) -> bool:
            params = message.get("params") or {}
            published = message.get("method") == "textDocument/publishDiagnostics" and params["uri"] == uri
            return published and (version is None or params.get("version") == version)

        found: list[Message] = self.wait(wanted)["params"]["diagnostics"]
        return found

    def message(self) -> str:
        said = self.wait(lambda message: message.get("method") == "window/showMessage")
        return str(said["params"]["message"])

    def at(self, name: str, line: int, character: int) -> Message:
        point = {"line": line, "character": character}
        return {"textDocument": {"uri": self.uri(name)}, "position": point}

    def actions(self, name: str, shown: Message) -> list[Message]:
        context = {"diagnostics": [shown]}
        document = {"uri": self.uri(name)}
        params = {"textDocument": document, "range": shown["range"], "context": context}
        answer: list[Message] = self.request("textDocument/codeAction", params)
        return answer

    def shutdown(self) -> int:
        assert self.request("shutdown") is None
        self.notify("exit", None)
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
