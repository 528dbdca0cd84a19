"""Which message of the protocol does what."""

from lsprotocol import types
from pygls import uris

from auditor.server.folders import Place
from auditor.server.language_server import WATCHED, PoolAuditServer


def make_server(pause: float | None = None) -> PoolAuditServer:
    """A server with every feature registered, ready to be started."""
    server = PoolAuditServer() if pause is None else PoolAuditServer(pause)
    _documents(server)
    _workspace(server)
    _questions(server)
    return server


def _documents(server: PoolAuditServer) -> None:
    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    def opened(params: types.DidOpenTextDocumentParams) -> None:
        server.changed(params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    def edited(params: types.DidChangeTextDocumentParams) -> None:
        server.changed(params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_DID_SAVE)
    def saved(params: types.DidSaveTextDocumentParams) -> None:
        server.changed(params.text_document.uri, typing=False)

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def closed(params: types.DidCloseTextDocumentParams) -> None:
        uri = params.text_document.uri
        server.versions.pop(uri, None)
        lone = next((place for place in server.published if uris.from_fs_path(place.location) == uri), None)
        if lone is not None:
            server.forget(lone)
        else:
            server.changed(uri, typing=False)


def _workspace(server: PoolAuditServer) -> None:
    @server.feature(types.INITIALIZED)
    def initialized(params: types.InitializedParams) -> None:
        _watch(server)
        server.everything_changed()

    @server.feature(types.WORKSPACE_DID_CHANGE_WORKSPACE_FOLDERS)
    def folders_changed(params: types.DidChangeWorkspaceFoldersParams) -> None:
        for gone in params.event.removed:
            server.forget(Place(uris.to_fs_path(gone.uri) or ""))
        server.everything_changed()

    @server.feature(types.WORKSPACE_DID_CHANGE_WATCHED_FILES)
    def files_changed(params: types.DidChangeWatchedFilesParams) -> None:
        server.everything_changed()

    @server.feature(types.WORKSPACE_DID_CHANGE_CONFIGURATION)
    def configured(params: types.DidChangeConfigurationParams) -> None:
        server.everything_changed()

    @server.feature(types.SHUTDOWN)
    def shutdown(params: None) -> None:
        server.analyst.stop()


def _watch(server: PoolAuditServer) -> None:
    """Ask to be told of changed settings and sources, if the client can be asked."""
    workspace = server.client_capabilities.workspace
    watching = workspace.did_change_watched_files if workspace else None
    if not (watching and watching.dynamic_registration):
        return
    watchers = [types.FileSystemWatcher(glob_pattern=pattern) for pattern in WATCHED]
    server.client_register_capability(
        types.RegistrationParams(
            [
                types.Registration(
                    id="poolaudit-files",
                    method=types.WORKSPACE_DID_CHANGE_WATCHED_FILES,
                    register_options=types.DidChangeWatchedFilesRegistrationOptions(watchers),
                )
            ]
        )
    )


def _questions(server: PoolAuditServer) -> None:
    kinds = types.CodeActionOptions(code_action_kinds=[types.CodeActionKind.QuickFix])

    @server.feature(types.TEXT_DOCUMENT_CODE_ACTION, kinds)
    def code_action(params: types.CodeActionParams) -> list[types.CodeAction]:
        return server.actions(params)

    @server.feature(types.TEXT_DOCUMENT_HOVER)
    def hover(params: types.HoverParams) -> types.Hover | None:
        return server.hover(params)
