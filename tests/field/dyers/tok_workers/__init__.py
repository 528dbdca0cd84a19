"""Detokenizer/tokenizer worker pool used by the API front end."""
from .frontend import FrontEnd
from .pool import Worker, WorkerPool

__all__ = ["FrontEnd", "Worker", "WorkerPool"]
