from .runner import CPRunner
from .streams import EventPool, SideStreams
from .workspace import Workspace

__all__ = ["CPRunner", "EventPool", "SideStreams", "Workspace"]
