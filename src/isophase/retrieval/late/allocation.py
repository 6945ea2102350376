"""Memory of a process that embeds for hours: what passes of ever other sizes leave behind."""

from __future__ import annotations

import ctypes
import os

# Of glibc's malloc.h. By itself glibc raises this threshold up to 32 MiB as blocks are freed.
_M_MMAP_THRESHOLD, _BYTES = -3, 2**20
_KERNELS = "32"


def keep_memory_steady() -> None:
    """Have large blocks given back to the system at once, and few kernels kept.

    Activations of ever other sizes leave gaps in the C library's heap, and oneDNN, which computes in bfloat16, keeps a
    kernel for each of the last 1,024 sizes. Both settings are the whole process's, so this is for a program, before its
    first forward pass, and not for a library. What the user has set in the environment stays. Without glibc only the
    second has an effect.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _KERNELS)
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    try:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _BYTES)
    except (AttributeError, OSError, TypeError):
        return
