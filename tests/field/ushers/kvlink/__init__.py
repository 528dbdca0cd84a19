from .connector import KVConnector
from .pages import PageAllocator
from .remote import RemoteStore

__all__ = ["KVConnector", "PageAllocator", "RemoteStore"]
