"""An export goes to the Hugging Face hub: what would be uploaded, and the upload.

Enters: an export's folder and a repository's name. Leaves: one commit with the export's own files, in a repository that
is made where there is none. The token comes from the environment (HF_TOKEN) and goes to the hub alone; HF_ENDPOINT is
another hub, as in all of Hugging Face's libraries. A private model never goes to a public repository by mistake: an
upload is refused where the repository is there and seen by others than asked for.
"""

from __future__ import annotations

import os

from domext_ray.errors import ConfigError, DomextError, RunError, hide_passwords
from domext_ray.export.folder import list_exported
from domext_ray.storage import Place

_CARD_LINES = 12


def describe_push(folder: Place, repo: str, *, is_private: bool) -> str:
    """Return the files with their sizes, who would see them, and how the model card begins; nothing is uploaded.

    `repo` is ORG/NAME.
    """
    files, local = list_exported(folder), folder.local()
    sizes = {name: (local / name).stat().st_size for name in files}
    width = max(len(f"{size:,}") for size in sizes.values())
    card = next(name for name in files if name.endswith("README.md"))
    text = (local / card).read_text(encoding="utf-8").splitlines()
    token = "is set" if _find_token() else "is not set, and the upload needs it"
    lines = [
        f"{hide_passwords(_find_hub())}/{repo} ({'private' if is_private else 'public: everybody sees it'}) would get "
        f"{len(sizes)} files, {sum(sizes.values()) / 1e6:,.1f} MB:",
        *(f"  {size:{width},} bytes  {name}" for name, size in sizes.items()),
        f"{card} begins:",
        *(f"  {line}".rstrip() for line in text[:_CARD_LINES]),
        f"Nothing was uploaded; --push_now true uploads (HF_TOKEN {token}).",
    ]
    return "\n".join(lines)


def push_export(folder: Place, repo: str, *, is_private: bool) -> str:
    """Upload an export in one commit, and return the commit's address."""
    files, local = list_exported(folder), folder.local()
    token, hub = _find_token(), _find_hub()
    if not token:
        raise ConfigError(
            "--push_now is True, and the environment has no HF_TOKEN; set it to a token that may write to "
            f"{repo.split('/')[0]} ({hub}/settings/tokens)."
        )
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(endpoint=hub, token=token)
    try:
        if not api.repo_exists(repo):
            api.create_repo(repo, private=is_private)
        elif (found := bool(api.repo_info(repo).private)) != is_private:
            raise ConfigError(
                f"--push_private is {is_private}, and {hub}/{repo} is there and "
                f"{'private' if found else 'public'}; give --push_private {str(found).lower()}, or another name."
            )
        # Not upload_folder, which uploads in several commits: the repository would hold half a model meanwhile.
        added = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=local / name) for name in files]
        return str(api.create_commit(repo, added, commit_message="Upload a model exported by domext_ray").commit_url)
    except DomextError:
        raise
    except Exception as error:  # the library raises a dozen kinds: offline, no route, refused, damaged answers …
        raise RunError(_describe_failure(f"{hub}/{repo}", error).replace(token, "***")) from None


def _find_token() -> str:
    return os.environ.get("HF_TOKEN", "").strip()


def _find_hub() -> str:
    return os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or "https://huggingface.co"


def _describe_failure(address: str, error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if type(error).__name__ == "OfflineModeIsEnabled":
        return "HF_HUB_OFFLINE keeps huggingface_hub off the network; unset it to upload."
    if status in (401, 403):
        return f"{address} refuses the token in HF_TOKEN ({status}); give one that may write there."
    if status is None:
        return f"{address} cannot be reached or read ({reason}); look after the network, and give the command again."
    return f"{address} refused the upload ({reason}); mend that, and give the command again."
