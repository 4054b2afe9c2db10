"""Reading a live model's attention while its own code runs: queries, keys, mask and scale of every call.

``taps.py`` watches where attention passes, ``hugging_face.py`` reads what transformers passes, ``capture.py`` is the
way in; ``compiling.py`` keeps the compiler out. Imports ``supervision`` and ``maps``.
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
