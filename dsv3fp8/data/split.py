"""Which documents are held out for validation. The same ones every time and everywhere.

The choice hangs on a hash of the contents: it does not change with the order or place of the files, and two copies
of a text always end up on the same side, so that nothing that was trained on is validated on.
"""

import hashlib

import numpy as np
import numpy.typing as npt

# From so many files on, whole files are held out, below it single documents: a share of a few files is too coarse.
FILES_TO_HOLD_OUT = 20
# A unit that takes the held-out part beyond so many times its share is left in the training split.
SLACK = 1.5


def hash64(data: bytes | str) -> int:
    """64 well-mixed bits of some contents."""
    raw = data.encode() if isinstance(data, str) else data
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8, person=b"dsv3fp8 split").digest(), "little")


def hold_out(hashes: npt.NDArray[np.uint64], sizes: npt.NDArray[np.int64], share: float) -> npt.NDArray[np.bool_]:
    """Mask of the units to validate on: about `share` of the total size, never none and never all.

    Units of equal hash stay together. All False if the units have but one hash: then nothing can be held out.
    """
    different, group = np.unique(hashes, return_inverse=True)
    totals = np.bincount(group, weights=sizes)
    chosen = np.zeros(len(different), bool)
    if len(different) < 2:
        return chosen[group]
    target, taken, left = share * totals.sum(), 0.0, len(different) - 1
    for i, size in enumerate(totals):  # np.unique sorts: the order of the hashes is the draw
        if taken >= target or not left:
            break
        if taken + size <= SLACK * target:
            chosen[i] = True
            taken, left = taken + size, left - 1
    if not chosen.any():
        chosen[np.argmin(totals)] = True
    return chosen[group]
