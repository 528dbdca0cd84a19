from .channel import Channel
from .receiver import Receiver
from .sender import Sender

__all__ = ["Channel", "Receiver", "Sender"]
