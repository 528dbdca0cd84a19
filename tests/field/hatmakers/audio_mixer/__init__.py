from .blocks import Block, BlockRing
from .mixer import Mixer
from .voices import Voice, VoiceBank

__all__ = ["Block", "BlockRing", "Mixer", "Voice", "VoiceBank"]
