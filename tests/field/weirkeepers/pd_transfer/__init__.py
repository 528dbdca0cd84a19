"""Moves finished prefills from prefill ranks to decode ranks."""
from .receiver import DecodeReceiver
from .sender import PrefillSender

__all__ = ["DecodeReceiver", "PrefillSender"]
