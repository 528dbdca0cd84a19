from .store import SessionStore
from .chat import ChatService

__all__ = ["SessionStore", "ChatService"]
