"""The language server: documents in, diagnostics out; one audit at a time, of what was typed last."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lsprotocol import types
from pygls import uris
from pygls.lsp.server import LanguageServer

from auditor import __version__
from auditor.model import Finding
from auditor.rule import all_rules
from auditor.server.analyst import Analyst, AnalystDied
from auditor.server.folders import Place, place_of
from auditor.server.translate import SOURCE, Translator, page
from auditor.server.workplace import Answer
from auditor.source.load import Unreadable, decode, lines_of

PAUSE = 0.2
"""Seconds without a change before an audit begins: typing a word is one change, not five."""

IDLE = 1.0
"""Seconds without a change before a whole audit follows a first answer; saving does not wait for it."""

WATCHED = ("**/*.py", "**/*.pyi", "**/poolaudit.toml", "**/pyproject.toml", "**/.gitignore")


class PoolAuditServer(LanguageServer):
    """Keeps, for each place, what it published, so that it can take it back."""

    def __init__(self, pause: float = PAUSE, idle: float = IDLE) -> None:
        super().__init__(SOURCE, __version__)
        self.pause = pause
        self.idle = idle
        self.analyst = Analyst()
        self.published: dict[Place, dict[str, list[types.Diagnostic]]] = {}
        self.findings: dict[str, list[tuple[Finding, types.Diagnostic]]] = {}
        self.versions: dict[str, int | None] = {}  # of each open document, the one that was audited last
        self._due: dict[Place, asyncio.TimerHandle] = {}
        self._turn = asyncio.Lock()
        self._settling = 0  # the number of the whole audit at work, if a glance could go before it
        self._complained = ""
        self._tasks: set[asyncio.Task[None]] = set()

    # What is to be audited ----------------------------------------------------------------------------------

    @property
    def folders(self) -> list[Place]:
        """The workspace folders, or the root that older clients name."""
        named = [uris.to_fs_path(uri) for uri in self.workspace.folders]
        root = self.workspace.root_path
        return [Place(os.path.normpath(path)) for path in named or [root] if path]

    def documents(self) -> dict[str, str]:
        """Location and text of the open Python documents."""
        found = {}
        for document in self.workspace.text_documents.values():
            path = location(document.uri)
            if path is not None and document.source is not None:
                found[path] = document.source
        return found

    def changed(self, uri: str, *, typing: bool = True) -> None:
        """A document was opened, edited, saved or closed: audit its place after a pause.

        While someone types, a glance at what was edited goes before the whole audit."""
        path = location(uri)
        if path is not None:
            self.schedule(place_of(path, self.folders), glance=typing)

    def everything_changed(self) -> None:
        """Settings or files changed on disk."""
        lone = [place for place in self.published if place not in self.folders]
        for place in (*self.folders, *lone):
            self.schedule(place)

    def schedule(self, place: Place, *, glance: bool = False) -> None:
        if glance and self._settling:
            self.analyst.withdraw(self._settling)
        self._after(self.pause, place, glance=glance)

    def _after(self, pause: float, place: Place, *, glance: bool = False) -> None:
        if place in self._due:
            self._due[place].cancel()
        loop = asyncio.get_running_loop()
        self._due[place] = loop.call_later(pause, self._begin, place, glance)

    def _begin(self, place: Place, glance: bool) -> None:
        del self._due[place]
        task = asyncio.get_running_loop().create_task(self._audit(place, glance))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _audit(self, place: Place, glance: bool) -> None:
        """Ask the analyst about what is open now; while it works, newer changes make the next question."""
        async with self._turn:
            if place in self._due:
                return  # changed again while we waited for our turn
            documents = self.documents()
            versions = {uri: doc.version for uri, doc in self.workspace.text_documents.items()}
            order = place.order(documents, glance=glance, number=self.analyst.number())
            self._settling = 0 if glance or place not in self.published else order.number
            try:
                answer = await asyncio.to_thread(self.analyst.ask, order)
            except AnalystDied as error:
                self.complain(f"{error}; the next change starts it again")
                return
            finally:
                self._settling = 0
            if not answer.settled and place not in self._due:
                self._after(self.idle, place)
            if answer.outdated:
                return
            self.versions |= versions
            self.complain(answer.wrong)
            if not answer.wrong:
                self._publish(place, answer, documents)

    # What is published --------------------------------------------------------------------------------------

    def _publish(self, place: Place, answer: Answer, documents: dict[str, str]) -> None:
        """Diagnostics of every file of the place, and none for those that had some and have none now."""
        translator = self.translator(documents)
        found: dict[str, list[types.Diagnostic]] = {}
        pairs: dict[str, list[tuple[Finding, types.Diagnostic]]] = {}
        for finding in answer.findings:
            uri = self.uri_of(finding.span.path)
            diagnostic = translator.diagnostic(finding)
            pairs.setdefault(uri, []).append((finding, diagnostic))
            found.setdefault(uri, []).append(diagnostic)
        for failure in answer.failures:
            found.setdefault(self.uri_of(failure.path), []).append(translator.failure(failure))
        before = self.published.get(place, {})
        for uri in sorted(before.keys() | found.keys()):
            if before.get(uri) != found.get(uri):
                self._send(uri, found.get(uri, []))
            self.findings[uri] = pairs.get(uri, [])
        self.published[place] = found

    def forget(self, place: Place) -> None:
        """Take back what was published for a place that is no longer there."""
        for uri in self.published.pop(place, {}):
            self.findings.pop(uri, None)
            self._send(uri, [])

    def _send(self, uri: str, diagnostics: list[types.Diagnostic]) -> None:
        version = self.versions.get(uri) if uri in self.workspace.text_documents else None
        self.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, diagnostics, version))

    def complain(self, message: str) -> None:
        """Say once what is wrong, until something else or nothing is."""
        if message and message != self._complained:
            shown = types.ShowMessageParams(types.MessageType.Error, f"{SOURCE}: {message}")
            self.window_show_message(shown)
        self._complained = message

    def uri_of(self, path: str) -> str:
        """As the client wrote it, where it has the document open."""
        for uri in self.workspace.text_documents:
            if location(uri) == path:
                return str(uri)
        return uri_from(path)

    def translator(self, documents: dict[str, str]) -> Translator:
        known: dict[str, Sequence[str]] = {}

        def lines(path: str) -> Sequence[str]:
            if path not in known:
                known[path] = lines_of(documents[path]) if path in documents else _lines_on_disk(path)
            return known[path]

        return Translator(self.workspace.position_codec, lines)

    # What is asked ------------------------------------------------------------------------------------------

    def at(self, uri: str, wanted: types.Range) -> list[tuple[Finding, types.Diagnostic]]:
        """Findings that touch a range of a document as it was audited; none if it has changed since."""
        if self._has_changed(uri):
            return []
        return [pair for pair in self.findings.get(uri, []) if _overlap(pair[1].range, wanted)]

    def actions(self, params: types.CodeActionParams) -> list[types.CodeAction]:
        uri = params.text_document.uri
        translator = self.translator(self.documents())
        found = [(self._as_audited(finding), shown) for finding, shown in self.at(uri, params.range)]
        return [action for finding, shown in found for action in translator.actions(uri, finding, shown)]

    def _as_audited(self, finding: Finding) -> Finding:
        """Without its fix where that edits another document, and this has changed since it was audited."""
        edits = finding.fix.edits if finding.fix is not None else ()
        stale = any(self._has_changed(self.uri_of(edit.span.path)) for edit in edits)
        return replace(finding, fix=None) if stale else finding

    def _has_changed(self, uri: str) -> bool:
        document = self.workspace.text_documents.get(uri)
        return document is not None and document.version != self.versions.get(uri)

    def hover(self, params: types.HoverParams) -> types.Hover | None:
        """The pages of the rules whose findings are under the cursor, with these findings' paths."""
        point = types.Range(params.position, params.position)
        found = self.at(params.text_document.uri, point)
        if not found:
            return None
        here: dict[str, list[Finding]] = {}
        for finding, _ in found:
            here.setdefault(finding.code, []).append(finding)
        pages = [page(rule, here[rule.meta.code]) for rule in all_rules() if rule.meta.code in here]
        text = types.MarkupContent(types.MarkupKind.Markdown, "\n---\n\n".join(pages))
        return types.Hover(text, found[0][1].range)


def location(uri: str) -> str | None:
    """The file that a document lies in; None for one that was never saved anywhere."""
    path = uris.to_fs_path(uri) if uri.startswith("file:") else None
    return os.path.normpath(path) if path else None


def uri_from(path: str) -> str:
    return str(uris.from_fs_path(path))


def _lines_on_disk(path: str) -> Sequence[str]:
    try:
        return lines_of(decode(Path(path).read_bytes()))
    except (OSError, Unreadable):
        return []


def _overlap(one: types.Range, other: types.Range) -> bool:
    return one.start <= other.end and other.start <= one.end
