"""Reading a live model's attention while its own code runs: queries, keys, mask and scale of every call.

``taps.py`` watches where attention passes and keeps the compiler out, ``layers.py`` says which layer made a call,
``outputs.py`` reads what the pass returned, and ``capture.py`` is the way in. Imports ``supervision`` and ``maps``.
"""

from shd_torch.capture.capture import AttentionCall, Captured, capture_attention, record_query_key

__all__ = ["AttentionCall", "Captured", "capture_attention", "record_query_key"]
