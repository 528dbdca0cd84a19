"""Device cache of expert weights for models with more experts than memory."""
from .lease import SlotLease
from .service import ExpertService
from .slots import SlotTable

__all__ = ["ExpertService", "SlotLease", "SlotTable"]
