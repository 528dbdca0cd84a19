from .gate import Gate, Reply
from .quota import QuotaLedger
from .workers import WorkerSet

__all__ = ["Gate", "QuotaLedger", "Reply", "WorkerSet"]
