"""`atoll export --push`: upload an export to a model repository of the hub."""

from pathlib import Path

from atoll.apps.models.model_card import CARD_FILE
from atoll.core.artifacts import Manifest
from atoll.core.errors import AtollError, first_line
from atoll.core.layout import MANIFEST_FILE
from atoll.core.progress import say


def publish(folder: Path, name: str, made: Manifest) -> str:
    """Upload the files of a manifest, the manifest and the card in one commit; return the address of the commit.

    A new repository is private: its owner decides when others see it. The token is that of `hf auth login`.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    hub = HfApi(library_name="atoll")
    try:
        hub.create_repo(name, private=True, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=name,
            folder_path=folder,
            allow_patterns=[*made.files, MANIFEST_FILE, CARD_FILE],
            commit_message=f"Export of Atoll, {made.digest[:16]}",
        )
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        raise AtollError(f"{folder} is complete, but was not uploaded to {name}: {first_line(error)}") from error
    say(f"{folder}: uploaded, {commit.commit_url}")
    return str(commit.commit_url)
