"""meshd: carves device meshes out of a rack and binds them to jobs."""
from .inventory import Rack, Tray
from .binding import MeshBinder
from .service import MeshService

__all__ = ["Rack", "Tray", "MeshBinder", "MeshService"]
