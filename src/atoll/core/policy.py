"""Who may publish in a run, and what: `policy.json` in the run, and ed25519 signatures over manifests.

A signature is over the job's name, the manifest's digest and what it says (`publish` or `admit`), so it cannot be moved
to another expert, to other weights, or to another purpose. A run without a policy trusts whoever can write to it.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, ValidationError, field_validator

from atoll.core.config_sections import Section
from atoll.core.errors import AtollError
from atoll.core.layout import POLICY_FILE
from atoll.core.names import OBJECTIVES, unknown_objective

if TYPE_CHECKING:
    pass

Role = Literal["publish", "admit"]


class Policy(Section):
    """What contributors may do in a run."""

    publishers: dict[str, str] = Field({}, description="name: public key of everyone who may publish; empty is anyone")
    admitters: dict[str, str] = Field(
        {},
        description="name: public key of those whose check lets an expert in; empty lets publishers check themselves",
    )
    objectives: list[str] | None = Field(None, description="names of the objectives allowed; null is any")
    networks: list[str] = Field(["DiT"], description="kinds of networks (DiT, UNetExpert, …) allowed")
    max_parameters: int = Field(2_000_000_000, ge=1, description="of one expert")
    max_bytes: int = Field(32 << 30, ge=1, description="of all files of one expert")
    max_held_out_loss: float | None = Field(
        None, gt=0, description="the bar: held-out velocity error on the expert's own cluster; null is none"
    )

    @field_validator("publishers", "admitters")
    @classmethod
    def _are_keys(cls, keys: dict[str, str]) -> dict[str, str]:
        for name, key in keys.items():
            if len(key) != 64 or any(letter not in "0123456789abcdef" for letter in key):
                raise ValueError(f"the key of {name} is not 64 hexadecimal digits; atoll keys prints one's own")
        return keys

    @field_validator("objectives")
    @classmethod
    def _are_objectives(cls, names: list[str] | None) -> list[str] | None:
        for name in names or []:
            if name not in OBJECTIVES:
                raise ValueError(unknown_objective(name))
        return names

    def keys(self, role: Role) -> dict[str, str]:
        """Name and key of those who may sign in a role."""
        return self.publishers if role == "publish" else self.admitters


def read_policy(data: bytes | None, source: str) -> Policy | None:
    """The policy of a run, or None if it has none."""
    if data is None:
        return None
    try:
        return Policy.model_validate(json.loads(data))
    except (ValidationError, ValueError) as error:
        raise AtollError(f"{source}: not a policy: {error}") from error


def policy_of(run: Path) -> Policy | None:
    """The policy in a run's folder."""
    file = run / POLICY_FILE
    return read_policy(file.read_bytes() if file.is_file() else None, str(file))


# Keys
