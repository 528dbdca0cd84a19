from .collector import Collector
from .learner import Learner
from .sampler import PrioritySampler
from .segments import Segment, SegmentStore

__all__ = ["Collector", "Learner", "PrioritySampler", "Segment", "SegmentStore"]
