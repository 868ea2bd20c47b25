"""A node's progress, saved with each checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from node.run.validation import Validated


@dataclass(frozen=True, slots=True)
class Progress:
    """Totals count from the node's first start."""

    round: int = 0
    next_index: int = 0  # of the node's own task stream
    generated_tokens: int = 0
    trained_tokens: int = 0
    groups_shared: int = 0
    held_out_first: float | None = None
    held_out_last: float | None = None
    validated: Validated = field(default_factory=Validated)
    methods: Mapping[str, Any] = field(default_factory=dict)  # what methods learned, by name

    def with_held_out(self, passed: float) -> "Progress":
        """The progress after another evaluation."""
        first = passed if self.held_out_first is None else self.held_out_first
        return replace(self, held_out_first=first, held_out_last=passed)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Progress":
        """Read the data of `asdict`.

        Raises:
            TypeError, KeyError, ValueError, AttributeError: the data is no progress.
        """
        methods = dict(fields.get("methods", {}))
        return cls(**{**fields, "validated": Validated(**fields["validated"]), "methods": methods})
