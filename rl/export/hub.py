"""An exported folder in a repository on the hub."""

from pathlib import Path
from typing import Any

from covey.rl.checkpoint import RunError
from covey.rl.export.source import ExportError


def check_repo(repo: str) -> None:
    """Refuses a name that no repository can have, and a user who is not logged in. Asks the hub who it is."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
        HfApi().whoami()
    except HFValidationError as error:
        raise ExportError(f"--push {repo}: {error}") from error
    except LocalTokenNotFoundError as error:
        raise ExportError(f"--push {repo}: you are not logged in; run `hf auth login`") from error
    except Exception as error:  # of the network, or of the hub: expired tokens, rate limits
        raise RunError(
            f"--push {repo}: the hub does not answer as it should ({error}); try again later"
        ) from error


def upload(folder: Path, repo: str, *, public: bool, message: str) -> str:
    """Uploads every file of `folder` and returns the repository's address.

    A new repository is private unless `public`. One that is public already is only written to with `public`.
    """
    from huggingface_hub import HfApi

    api: Any = HfApi()
    try:
        url = str(api.create_repo(repo, private=not public, exist_ok=True))
        if not public and not api.repo_info(repo).private:
            raise ExportError(
                f"{repo} exists and everyone can read it; say --public if that is meant, or push to another name. "
                f"The export itself is complete: {folder}"
            )
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except ExportError:
        raise
    except Exception as error:  # of the network, or of the hub: no right to write there, no room left
        raise RunError(
            f"{folder} is complete, but could not be pushed to {repo} ({error}); `hf upload {repo} {folder}` does the "
            "same once that is mended"
        ) from error
    return url
