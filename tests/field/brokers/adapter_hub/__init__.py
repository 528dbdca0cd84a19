from .server import AdapterServer

__all__ = ["AdapterServer"]
