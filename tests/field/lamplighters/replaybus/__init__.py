"""Replay transport between actors and a learner."""
from replaybus.actor import Actor
from replaybus.learner import Learner
from replaybus.segments import Segment, SegmentStore, StoreFull
from replaybus.transport import Bus

__all__ = ["Actor", "Bus", "Learner", "Segment", "SegmentStore", "StoreFull"]
