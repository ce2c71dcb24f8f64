"""Network configurations: named sizes, and plain values for manifests."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from atoll.errors import AtollError, unknown

SIZES: dict[str, dict[str, int]] = {
    "XS": {"width": 256, "depth": 8, "heads": 4},
    "S": {"width": 384, "depth": 12, "heads": 6},
    "B": {"width": 768, "depth": 12, "heads": 12},
    "L": {"width": 1024, "depth": 24, "heads": 16},
    "XL": {"width": 1152, "depth": 28, "heads": 16},
}
NAMES: dict[str, dict[str, int]] = {
    f"DiT-{size}/{patch}": {**shape, "patch": patch} for size, shape in SIZES.items() for patch in (2, 4, 8)
}
"""The named sizes: DiT-XS/2, …, DiT-XL/8."""


@dataclass(frozen=True)
class NamedConfig:
    """A configuration that can start from a named size and travels as plain values."""

    @classmethod
    def named(cls, name: str, **changes: Any) -> Self:
        """A named size (`DiT-XL/2`), with any other field given by keyword."""
        if name not in NAMES:
            raise AtollError(unknown("network size", name, NAMES))
        return cls.from_dict({**NAMES[name], **changes})

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read what `to_dict` wrote; an unknown field is refused by name."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise AtollError(unknown(f"field of {cls.__name__}", name, known))
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain values for a manifest."""
        return asdict(self)
