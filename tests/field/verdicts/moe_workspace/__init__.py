from .manager import WorkspaceManager
from .kernels import FusedExperts

__all__ = ["WorkspaceManager", "FusedExperts"]
