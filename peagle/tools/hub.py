"""A head on the Hugging Face hub: config.json, tensors, and a model card of what is recorded."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, ModelCardData, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

from peagle.catalog import load_catalog, speculative_config
from peagle.catalog_fields import is_hub_id
from peagle.errors import InputError, first_line
from peagle.methods.checkpoint import read_config, read_tensors
from peagle.methods.keys import default_k
from peagle.methods.registry import method_of
from peagle.model.config import DrafterConfig

FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "README.md", "correction/*")
REFUSED = {
    401: "the token is not valid there: run `hf auth login` or set HF_TOKEN",
    403: "the token may not write there: make one with write access, or name another repository",
    404: "no such repository, or the token may not see it",
}
CARD = Path(__file__).with_name("model_card.md.j2")


def push_head(  # noqa: PLR0913
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str = "Upload head",
    api: HfApi | None = None,
) -> str:
    """Upload a head to a hub repository, made when it is missing; returns the commit's address.

    A head without a README.md gets a model card there, not in `folder`. Raises InputError for a
    folder that is no head, a missing or refused token, and a hub that cannot be reached.
    """
    folder = Path(folder).expanduser()
    api = api or HfApi()
    if not folder.is_dir():
        raise InputError(f"head {folder}: no such folder")
    config = read_config(folder)
    read_tensors(folder)
    if not (api.token or get_token()):
        raise InputError("no Hugging Face token: run `hf auth login` or set HF_TOKEN")
    with _input_errors(repo_id, api.endpoint):
        repo_id = api.create_repo(repo_id, private=private or None, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        files: dict[str, bytes | Path] = {"README.md": str(model_card(config, repo_id)).encode()}
        for pattern in FILES:
            files |= {str(file.relative_to(folder)): file for file in folder.glob(pattern)}
        added = [CommitOperationAdd(name, content) for name, content in files.items()]
        commit = api.create_commit(repo_id, added, commit_message=message, revision=revision)
    return str(commit.commit_url)


@contextmanager
def _input_errors(repo_id: str, endpoint: str) -> Iterator[None]:
    """Raise the hub's errors as InputError."""
    try:
        yield
    except HfHubHTTPError as error:
        code = error.response.status_code
        why = REFUSED.get(code, first_line(error))
        raise InputError(f"{repo_id}: {endpoint} answers {code}: {why}") from error
    except HFValidationError as error:
        raise InputError(f"{repo_id!r} is no repository: name owner/name") from error
    except (HTTPError, OSError) as error:
        why = f"{endpoint} cannot be reached ({first_line(error)})"
        raise InputError(f"{repo_id}: {why}") from error
    except (RuntimeError, ValueError) as error:  # of the upload itself
        raise InputError(f"{repo_id}: {first_line(error)}") from error


def model_card(config: DrafterConfig, repo_id: str) -> ModelCard:
    """Describe a head by what its config records. No licence: nobody recorded one."""
    method = method_of(config)
    trained = config.provenance.target
    base = _hub_id(trained)
    vllm_head = "head-for-vllm" if config.embedding == "mask-row" else repo_id
    speculative = speculative_config(method.parallel, vllm_head, default_k(config))
    tags = ["speculative-decoding", *{speculative["method"], config.method}]
    data = ModelCardData(
        base_model=base, library_name="peagle", pipeline_tag="text-generation", tags=sorted(tags)
    )
    return ModelCard.from_template(
        data,
        template_path=str(CARD),
        config=config,
        repo_id=repo_id,
        title=method.title,
        parallel=method.parallel,
        target=base or Path(trained).name,  # not where somebody keeps it
        served=base or "TARGET",
        local=trained if trained in load_catalog() else base or "TARGET",
        speculative=speculative,
        measured={name: _by_k(found) for name, found in config.provenance.acceptance.items()},
    )


def _hub_id(target: str) -> str | None:
    """The hub repository of a target's name; None for folders, files and packages."""
    entry = load_catalog().get(target)
    known = entry.target if entry else target
    if not isinstance(known, str) or not is_hub_id(known) or Path(known).exists():
        return None
    return known.partition("@")[0]


def _by_k(found: dict[str, Any]) -> dict[str, float]:
    """Acceptance lengths by K: so it is recorded, or as one measurement with its K."""
    return {found["k"]: found["acceptance_length"]} if "k" in found else found
