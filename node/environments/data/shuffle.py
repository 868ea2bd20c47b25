"""An order of items that follows from a key, without a list of it: a Feistel network of four rounds
over the smallest power of four that holds them, walked until it lands among them. Pure."""

import hashlib
from typing import Final

ROUNDS: Final = 4
_DOMAIN: Final = b"swarm/shuffle/1"


def shuffled(place: int, count: int, seed: int, epoch: int) -> int:
    """The number of the item that comes at `place`, both from 0. For one seed and epoch each comes
    once; takes about 10 µs, whatever `count` is."""
    assert 0 <= place < count
    half = max(1, (max(1, count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = hashlib.blake2b(
        seed.to_bytes(8, "big") + epoch.to_bytes(8, "big"), key=_DOMAIN, digest_size=16
    ).digest()
    while True:  # at most four times as many numbers as items: four steps in the mean
        left, right = place >> half, place & mask
        for turn in range(ROUNDS):
            left, right = right, left ^ (_mixed(key, turn, right) & mask)
        place = left << half | right
        if place < count:
            return place


def _mixed(key: bytes, turn: int, value: int) -> int:
    mixed = hashlib.blake2b(value.to_bytes(8, "big"), key=key, salt=bytes([turn]), digest_size=8)
    return int.from_bytes(mixed.digest(), "big")
