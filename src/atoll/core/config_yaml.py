"""The configuration as YAML with a comment for every key, as `atoll init` writes it."""

from collections.abc import Mapping

import yaml
from pydantic import BaseModel

from atoll.core.config import Config
from atoll.core.config_sections import NAMED_OBJECTIVES, Objective


def to_yaml(config: Config, notes: Mapping[str, str] | None = None) -> str:
    """Return the whole configuration as YAML, with a comment for every key; `notes` add to the comments by key."""
    lines: list[str] = []
    _write_section(config, lines, "", notes=notes or {})
    return "\n".join(lines) + "\n"


def _write_section(section: BaseModel, lines: list[str], above: str, *, notes: Mapping[str, str]) -> None:
    indent = "  " if above else ""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        note = f" ({notes[above + name]})" if above + name in notes else ""
        if isinstance(value, BaseModel) and not indent:
            if lines:
                lines.append("")
            lines.append(f"{name}:  # {type(value).__doc__}")
            _write_section(value, lines, f"{name}.", notes=notes)
            continue
        plain = section.model_dump(mode="json", include={name})[name]
        if name == "experts":
            plain = {key: _objective_name(objective) for key, objective in value.items()}
        comment = f"  # {field.description}{note}" if field.description else ""
        if isinstance(plain, dict) and plain:
            lines.extend(["", f"{indent}{name}:{comment}"] if not indent else [f"{indent}{name}:{comment}"])
            lines.extend(f"{indent}  {key}: {_inline(item)}" for key, item in plain.items())
        else:
            lines.append(f"{indent}{name}: {_inline(plain)}{comment}")


def _inline(value: object) -> str:
    """Return one value as YAML on one line."""
    # The width is larger than any value, so that PyYAML never breaks the line.
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).removesuffix("\n...\n").strip()


def _objective_name(objective: Objective) -> object:
    for name, known in NAMED_OBJECTIVES.items():
        if known == objective:
            return name
    return objective.model_dump(mode="json", exclude_defaults=True)
