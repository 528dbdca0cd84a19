from .runtime import MoERuntime

__all__ = ["MoERuntime"]
