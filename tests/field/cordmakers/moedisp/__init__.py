"""Expert parallel dispatch: token buffers, expert groups and the layer."""
from .buffers import TokenBuffers
from .experts import ExpertGroups
from .layer import MoELayer

__all__ = ["TokenBuffers", "ExpertGroups", "MoELayer"]
