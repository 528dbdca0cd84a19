from .blocks import BlockAllocator
from .memory import RegistrationCache, StagingPool
from .prefill import PrefillSender
from .decode import DecodeReceiver
