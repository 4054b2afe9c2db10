"""Reading a live model's attention while its own code runs: queries, keys, mask and scale of every call.

``taps.py`` watches where attention passes and keeps the compiler out, ``call.py`` says what a call means,
``layers.py`` which layer made it, and ``capture.py`` is the way in. Imports ``supervision`` and ``maps``.
"""

from shd_torch.capture.call import AttentionCall
from shd_torch.capture.capture import (
    AttentionCapture,
    Captured,
    capture_attention,
    record_attention,
    record_query_key,
)

__all__ = [
    "AttentionCall",
    "AttentionCapture",
    "Captured",
    "capture_attention",
    "record_attention",
    "record_query_key",
]
