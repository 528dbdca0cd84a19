"""Multimodal preprocessing and encoding in front of the language model."""
from .encoder import EncoderWorker
from .frames import FramePool, Workspace
from .session import MediaSession, SessionTable

__all__ = ["EncoderWorker", "FramePool", "Workspace", "MediaSession", "SessionTable"]
