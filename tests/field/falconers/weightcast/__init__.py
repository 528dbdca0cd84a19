"""Weights from the trainer to the rollout engines, a version at a time."""
from .arena import Arena, ArenaBusy
from .sender import Sender
from .versions import VersionBook

__all__ = ["Arena", "ArenaBusy", "Sender", "VersionBook"]
