"""Weight synchronisation from the trainer to rollout workers."""
from .channels import ChannelSet
from .receiver import WeightReceiver
from .sender import WeightSender
from .versions import VersionStore

__all__ = ["ChannelSet", "VersionStore", "WeightSender", "WeightReceiver"]
