from .refs import AdapterHandle, Registry
from .service import AdapterService

__all__ = ["AdapterHandle", "AdapterService", "Registry"]
