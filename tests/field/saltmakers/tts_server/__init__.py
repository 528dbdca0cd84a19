"""Text-to-speech server with pooled mel slabs and shared speaker embeddings."""
from .arenas import Gate, MelArena, MelSlab, VoiceShelf
from .server import SpeechServer
from .session import SpeechSession, Utterance

__all__ = [
    "Gate",
    "MelArena",
    "MelSlab",
    "SpeechServer",
    "SpeechSession",
    "Utterance",
    "VoiceShelf",
]
