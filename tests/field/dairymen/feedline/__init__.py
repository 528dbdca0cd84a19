from .line import build, epoch

__all__ = ["build", "epoch"]
