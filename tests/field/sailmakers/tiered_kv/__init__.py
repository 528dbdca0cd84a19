"""Two-tier KV storage with sessions: device pages, remote objects and the migration between them."""
from .pages import DevicePages, PageRef
from .remote import RemoteStore, RemoteLease
from .migrate import Migrator
from .sessions import SessionTable

__all__ = ["DevicePages", "PageRef", "RemoteStore", "RemoteLease", "Migrator", "SessionTable"]
