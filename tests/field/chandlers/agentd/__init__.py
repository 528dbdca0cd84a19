from .broker import ToolBroker
from .runner import AgentRunner
from .workspace import WorkspacePool

__all__ = ["AgentRunner", "ToolBroker", "WorkspacePool"]
