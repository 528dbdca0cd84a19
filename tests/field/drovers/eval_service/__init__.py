from .service import EvalService

__all__ = ["EvalService"]
