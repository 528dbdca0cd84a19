"""Relays gradient buckets between trainer ranks and the parameter hosts."""
from .pools import BucketPool, StubRing
from .pull import ParamPuller
from .push import GradPusher

__all__ = ["BucketPool", "StubRing", "GradPusher", "ParamPuller"]
