from .controller import TierController

__all__ = ["TierController"]
