from .agent import ElasticAgent
from .slots import SlotLedger

__all__ = ["ElasticAgent", "SlotLedger"]
