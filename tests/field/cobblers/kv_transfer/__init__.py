from .regions import MemoryRegion, RegionTable, RegistrationError
from .session import PeerSession, SessionFactory
from .sender import KVSender
from .receiver import KVReceiver

__all__ = ["MemoryRegion", "RegionTable", "RegistrationError", "PeerSession", "SessionFactory", "KVSender", "KVReceiver"]
