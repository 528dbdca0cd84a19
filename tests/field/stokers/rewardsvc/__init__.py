from .service import RewardService

__all__ = ["RewardService"]
