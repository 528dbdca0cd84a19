from .schedule import OneForwardOneBackward
from .stage import PipelineStage

__all__ = ["OneForwardOneBackward", "PipelineStage"]
