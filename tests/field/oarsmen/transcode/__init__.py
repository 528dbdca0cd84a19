"""Live transcoding: one input, a ladder of renditions, any number of subscribers."""
from .service import Service
from .sessions import Card, Farm, NoSession

__all__ = ["Card", "Farm", "NoSession", "Service"]
