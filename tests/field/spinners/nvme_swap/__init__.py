from .swapper import OptimizerSwapper, ParamSwapper

__all__ = ["OptimizerSwapper", "ParamSwapper"]
