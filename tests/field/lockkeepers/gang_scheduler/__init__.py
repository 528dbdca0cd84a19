"""Gang scheduler for training jobs on a small cluster."""
from .inventory import Inventory, NodeGrant
from .jobs import ElasticJob, GangJob
from .placement import Placer

__all__ = ["Inventory", "NodeGrant", "ElasticJob", "GangJob", "Placer"]
