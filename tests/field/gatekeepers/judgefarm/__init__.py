"""LLM-as-judge farm: credits pay for calls, seats bound the panels."""
from .credits import Bankrupt, Draw, Purse
from .panel import Panel, SeatMap
from .service import JudgeService

__all__ = ["Bankrupt", "Draw", "JudgeService", "Panel", "Purse", "SeatMap"]
