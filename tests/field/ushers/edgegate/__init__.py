from .router import Router

__all__ = ["Router"]
