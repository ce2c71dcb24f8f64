"""What changed between two nested settings, for error messages."""

import json
from typing import Any


def differences(was: Any, now: Any, key: str = "") -> list[str]:
    """Return what changed between two nested settings, one phrase for each leaf."""
    if was == now:
        return []
    if isinstance(was, dict) and isinstance(now, dict):
        names = list(dict.fromkeys([*was, *now]))
        return [
            phrase
            for name in names
            for phrase in differences(
                was.get(name), now.get(name), f"{key}.{name}" if key and key != "made_from" else name
            )
        ]
    return [f"{key} was {_short(was)}, now {_short(now)}"]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    # Twelve digits distinguish the hashes of one run, as in git's abbreviated commits.
    is_hash = len(text) >= 32 and all(letter in "0123456789abcdef" for letter in text)
    return f"{text[:12]}…" if is_hash else text
