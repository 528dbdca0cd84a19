from .budget import Grant, TokenBudget
from .engine import Scheduler
from .request import Request

__all__ = ["Grant", "TokenBudget", "Scheduler", "Request"]
