"""SGLang's own hashes of a tensor, computed on a CPU and as the bytes come: what `/weights_checker` answers with.

On a CPU a server hashes with SHA-256, on a GPU with a Triton kernel (sglang, srt/managers/mm_utils.py: tensor_hash, and
gpu_tensor_hash beside it). The kernel mixes each 32-bit word with its place, adds up tiles of 8192 words, mixes the
sums, and adds those up; so it can be computed a piece at a time, in any number of pieces.
"""

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
DIGITS = 16
TILE = 8192
"""Words of a tile: 32 KiB."""
SPAN = 2 * TILE
"""Words that are mixed at a time: they and what is computed of them fit in a core's own cache."""
WORD, WORDS = 4, 0xFFFFFFFF
DOUBLE = (1 << 64) - 1
SEED = 0x243F6A88
LANES = (
    (0x27D4EB2D, SEED, 15),
    (0x165667B1, (SEED * 0x9E3779B1 ^ 0xDEADBEEF) & WORDS, 13),
)
"""For each half of a tile's sum: the factor of a word's place, what is added to it, and how far the place is rotated."""


def hash_of(on_gpu: bool, nbytes: int) -> Any:
    """Return the hash that a server on such a device takes of a tensor of so many bytes.

    update() takes the next of them, uint8 [bytes]; of what hexdigest() returns the server writes the first DIGITS.
    """
    return GpuHash(nbytes) if on_gpu else hashlib.sha256()


class GpuHash:
    """What SGLang's Triton kernel computes."""

    def __init__(self, nbytes: int) -> None:
        words = -(-nbytes // WORD)
        self._word_bytes = np.uint32(words * WORD & WORDS)
        self._place = 0
        """Words that were taken."""
        self._left = np.empty(0, np.uint8)
        """Bytes that came and do not fill a span yet."""
        self._total = 0
        self._places = np.arange(SPAN, dtype=np.uint32)
        self._index, self._mixed, self._scratch = (np.empty(SPAN, np.uint32) for _ in range(3))

    def update(self, data: NDArray[np.uint8]) -> None:
        data = np.concatenate([self._left, data]) if len(self._left) else data
        whole = len(data) // (SPAN * WORD) * (SPAN * WORD)
        self._take(data[:whole])
        self._left = data[whole:].copy()

    def hexdigest(self) -> str:
        if len(self._left):
            padding = np.zeros(-len(self._left) % WORD, np.uint8)
            self._take(np.concatenate([self._left, padding]))
            self._left = self._left[:0]
        found = self._total
        if self._place:
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
                found = (found ^ found >> shift) * factor & DOUBLE
            found ^= found >> 31
        return f"{found:016x}"

    def _take(self, data: NDArray[np.uint8]) -> None:
        words = np.ascontiguousarray(data).view(np.uint32)
        for start in range(0, len(words), SPAN):
            self._take_span(words[start : start + SPAN])

    def _take_span(self, words: Words) -> None:
        """Add the tiles of these words, of which only the last span may be short."""
        count = len(words)
        index, mixed, scratch = self._index[:count], self._mixed[:count], self._scratch[:count]
        np.add(self._places[:count], np.uint32(self._place & WORDS), out=index)
        self._place += count
        halves = []
        for factor, added, turn in LANES:
            np.multiply(index, np.uint32(factor), out=mixed)
            np.add(mixed, np.uint32(added), out=mixed)
            for shift, by in ((np.left_shift, turn), (np.right_shift, 32 - turn)):
                np.bitwise_xor(mixed, shift(index, by, out=scratch), out=mixed)
            np.bitwise_xor(mixed, words, out=mixed)
            _mix(mixed, scratch)
            sums = np.add.reduceat(mixed, np.arange(0, count, TILE), dtype=np.uint32) ^ self._word_bytes
            _mix(sums, np.empty_like(sums))
            halves.append(sums.astype(np.uint64))
        tiles = halves[0] << np.uint64(32) | halves[1]
        self._total = (self._total + int(tiles.sum(dtype=np.uint64))) & DOUBLE


def _mix(words: Words, scratch: Words) -> None:
    """Mix each word's bits in place, as MurmurHash3 ends."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 0)):
        np.right_shift(words, shift, out=scratch)
        np.bitwise_xor(words, scratch, out=words)
        if factor:
            np.multiply(words, np.uint32(factor), out=words)
