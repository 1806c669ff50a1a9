"""Noise as a function of (seed, position): no generator state, so batches, preemption and retries change nothing.

The function is the finalizer of SplitMix64 (Steele, Lea, Flood 2014) applied twice: once to the seed, once to the
result plus the position times the golden-ratio increment. The upper 53 bits become a float64 in [0, 1).
"""

from __future__ import annotations

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S11 = (np.uint64(n) for n in (27, 30, 31, 11))


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return x ^ (x >> _S31)


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniform float64 in [0, 1) for each (seed uint64, position int64)."""
    state = _mix(seeds + _GOLDEN)
    bits = _mix(state + positions.astype(np.uint64) * _GOLDEN)
    return (bits >> _S11).astype(np.float64) * 2.0**-53


def seed_of(id: str, base: int = 0) -> int:
    """The seed of a request that gives none: from its id and the engine's own seed, as a non-negative int64."""
    digest = hashlib.blake2b(f"{base}:{id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
