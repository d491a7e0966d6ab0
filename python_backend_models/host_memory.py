"""Bounds for what a process keeps of memory it no longer uses: after weeks it's as large as after minutes.

Two things grow for long without being leaks: glibc gives each thread an arena of its own, and these keep what
was freed in them; and oneDNN keeps generated code and scratch memory for each of the last 1024 shapes it met,
several hundred MB for windows of every length. Both have a limit that a process can set for itself.
"""

import ctypes
import os

# Full windows come in a handful of shapes, each with some thirty convolutions; the ends of songs in hundreds.
_ONEDNN_PRIMITIVES = 128
_ARENAS = 2
_M_ARENA_MAX = -8  # malloc.h

ONEDNN_VARIABLE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
ARENAS_VARIABLE = "MALLOC_ARENA_MAX"


def bound_host_memory() -> None:
    """Set both limits for this process, unless its environment says otherwise.

    To be called before the first convolution: oneDNN reads its limit once, when it is first used. Where the C
    library isn't glibc its arenas are left alone.
    """
    os.environ.setdefault(ONEDNN_VARIABLE, str(_ONEDNN_PRIMITIVES))
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and ARENAS_VARIABLE not in os.environ:
        mallopt(_M_ARENA_MAX, _ARENAS)
