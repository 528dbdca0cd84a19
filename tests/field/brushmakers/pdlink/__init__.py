"""Transfer link of prefill and decode workers."""
from .channels import ChannelTable
from .flow import Window
from .push import Pusher
from .serve import PullServer

__all__ = ["ChannelTable", "Window", "Pusher", "PullServer"]
