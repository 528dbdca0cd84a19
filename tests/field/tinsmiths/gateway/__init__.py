"""HTTP gateway pieces."""
from .api import Api
from .quota import KeyQuota, QuotaExceeded

__all__ = ["Api", "KeyQuota", "QuotaExceeded"]
