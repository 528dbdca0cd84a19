from .engine import Engine
from .scheduler import Scheduler
from .sequence import SamplingParams, Sequence, SeqStatus

__all__ = ["Engine", "SamplingParams", "Scheduler", "SeqStatus", "Sequence"]
