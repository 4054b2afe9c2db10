"""What a system refuses: files that grow too large, and files that may not be opened (not a test itself)."""

import ctypes
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_OVERRIDE, _SEARCH = 1, 2  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: permissions do not stop an administrator


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """The kernel lets no file grow beyond ``size`` bytes; not even pytest's own output, so keep this short."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@contextmanager
def permissions_count() -> Iterator[None]:
    """Also for an administrator, in this thread and those that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    held = (ctypes.c_uint32 * 6)()
    if libc.capget(header, held):
        raise OSError(ctypes.get_errno(), "capget")
    fewer = (ctypes.c_uint32 * 6)(*held)
    fewer[0] &= ~(1 << _OVERRIDE | 1 << _SEARCH)
    libc.capset(header, fewer)
    try:
        yield
    finally:
        libc.capset(header, held)
