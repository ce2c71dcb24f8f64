"""The policy of a shared run (`policy.json`): who may publish and admit experts, and limits on those experts.

A run without a policy trusts everybody who can write to its store. Signatures are checked in `core/signing.py`.
"""

import json
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, field_validator

from atoll.core.config_sections import Section
from atoll.core.errors import AtollError
from atoll.core.layout import POLICY_FILE
from atoll.core.names import OBJECTIVES, unknown_objective

Role = Literal["publish", "admit"]


class Policy(Section):
    """The rules for contributions to a run."""

    publishers: dict[str, str] = Field({}, description="name: public key of those who may publish; empty allows anyone")
    admitters: dict[str, str] = Field(
        {},
        description="name: public key of those who may admit an expert; empty needs no admission",
    )
    objectives: list[str] | None = Field(None, description="names of the allowed objectives; null allows all")
    networks: list[str] = Field(["DiT"], description="allowed kinds of networks (DiT, UNetExpert, …)")
    # Both limits bound what a worker downloads and loads before it can judge an expert. Two billion parameters are
    # three times the 606 M of DiT-XL/2 with text; 32 GB hold them four times over in float32.
    max_parameters: int = Field(2_000_000_000, ge=1, description="largest number of parameters of one expert")
    max_bytes: int = Field(32 << 30, ge=1, description="largest size of all files of one expert, in bytes")
    max_held_out_loss: float | None = Field(
        None, gt=0, description="largest held-out velocity error on the expert's cluster; null allows any"
    )

    @field_validator("publishers", "admitters")
    @classmethod
    def _are_keys(cls, keys: dict[str, str]) -> dict[str, str]:
        for name, key in keys.items():
            if len(key) != 64 or any(letter not in "0123456789abcdef" for letter in key):
                raise ValueError(f"the key of {name} is not 64 hexadecimal digits; atoll keys prints your public key")
        return keys

    @field_validator("objectives")
    @classmethod
    def _are_objectives(cls, names: list[str] | None) -> list[str] | None:
        for name in names or []:
            if name not in OBJECTIVES:
                raise ValueError(unknown_objective(name))
        return names

    def keys(self, role: Role) -> dict[str, str]:
        """Return name and public key of those who may sign in a role."""
        return self.publishers if role == "publish" else self.admitters


def read_policy(data: bytes | None, source: str) -> Policy | None:
    """Parse the content of a policy.json; None stays None. `source` names the file in errors."""
    if data is None:
        return None
    try:
        return Policy.model_validate(json.loads(data))
    except (ValidationError, ValueError) as error:
        raise AtollError(f"{source}: not a policy: {error}") from error


def policy_of(run: Path) -> Policy | None:
    """Return the policy in a run's folder, or None if there is none."""
    file = run / POLICY_FILE
    return read_policy(file.read_bytes() if file.is_file() else None, str(file))
