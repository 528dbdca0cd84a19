"""Speculative decoding: draft slots, verification and sampling workspaces."""
from .proposer import DraftProposer
from .verifier import Verifier
from .workspace import WorkspacePool, workspace

__all__ = ["DraftProposer", "Verifier", "WorkspacePool", "workspace"]
