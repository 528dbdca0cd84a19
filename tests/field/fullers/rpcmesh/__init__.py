from .channels import Channel, ChannelManager, LeaseTimeout
from .health import Monitor
from .router import Router, SessionRouter
from .stubs import EncoderStub, ModelStub

__all__ = ["Channel", "ChannelManager", "EncoderStub", "LeaseTimeout", "ModelStub", "Monitor", "Router", "SessionRouter"]
