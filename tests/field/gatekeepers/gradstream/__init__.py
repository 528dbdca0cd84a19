"""Streams updated parameters to rollout nodes over registered memory."""
from .plan import TransferPlan, build_plan
from .receiver import Receiver
from .regions import PinLimit, Region, RegionTable
from .sender import StreamSession, push

__all__ = ["PinLimit", "Receiver", "Region", "RegionTable", "StreamSession", "TransferPlan", "build_plan", "push"]
