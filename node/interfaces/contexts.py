"""The context length in tokens, from a model's configuration. Imports neither torch nor vLLM."""

from collections.abc import Mapping
from typing import Any, Final

_LENGTHS: Final = ("max_position_embeddings", "n_positions", "max_seq_len")
_SHORT: Final = "original_max_position_embeddings"
_SWITCHING: Final = ("longrope", "su")


def context_in(config: Mapping[str, Any]) -> int | None:
    """The context length by a text configuration; None: it names no limit.

    For LongRoPE it is the length at which the rotations change: a longer text would change the
    others in its batch and the cache.
    """
    lengths: list[Any] = [config.get(key) for key in _LENGTHS]
    lengths = [each for each in lengths if _is_length(each)][:1]
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(rope, Mapping):
        for each in (rope, *(kind for kind in rope.values() if isinstance(kind, Mapping))):
            if each.get("rope_type", each.get("type")) in _SWITCHING:
                lengths += [each.get(_SHORT), config.get(_SHORT)]
    return min(filter(_is_length, lengths), default=None)


def _is_length(value: Any) -> bool:
    return type(value) is int and value > 0
