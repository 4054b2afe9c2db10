"""Is the start worth it? A student beside its teacher and beside other starts of the same size.

``rivals`` are other ways to make a student of the same sizes, ``measure`` is cost and loss, and ``starts`` the table.
"""

from shd_torch.shrink.compare.starts import Start, compare_starts

__all__ = ["Start", "compare_starts"]
