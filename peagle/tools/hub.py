"""A head on the Hugging Face hub: config.json, tensors, and a model card of what is recorded."""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi, ModelCard, ModelCardData, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

from peagle.catalog import load_catalog
from peagle.errors import InputError, first_line
from peagle.methods.checkpoint import read_config, read_tensors
from peagle.model.config import DrafterConfig

FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "README.md")
REFUSED = {
    401: "the token is not valid there: run `hf auth login` or set HF_TOKEN",
    403: "the token may not write there: make one with write access, or name another repository",
    404: "no such repository, or the token may not see it",
}
KINDS = {
    "p-eagle": ("P-EAGLE", "all draft tokens in one forward"),
    "eagle3": ("EAGLE-3", "one forward a draft token"),
}
CARD = """\
---
{{ card_data }}
---

# {{ repo_id.split("/")[-1] }}

This {{ kind }} head drafts for {{ target or "its target" }}, {{ how }}.
The target verifies every draft, so that the text is the target's own.

Layers: {{ config.transformer.num_hidden_layers }}; draft vocabulary: {{ config.draft_vocab_size }}
tokens; features: what enters target layers {{ config.feature_layers | join(", ") }}; trained for
{{ config.depths }} draft tokens.

## Training

{% for name, value in config.provenance.data.items() -%}
- {{ name | replace("_", " ") }}: {{ "{:,}".format(value) if value is integer else value }}
{% else -%}
Not recorded.
{% endfor %}
## Acceptance

{% if measured -%}
| data set | K | acceptance length |
|---|---|---|
{% for row in measured -%}
| {{ row.dataset }} | {{ row.k }} | {{ "%.2f" | format(row.length) }} |
{% endfor %}
{%- else -%}
Not recorded; measure it with `peagle eval`.
{% endif %}
## Use

With peagle:

```sh
peagle generate {{ local }} --head {{ repo_id }} --prompt "Hello"
```

With vLLM{% if config.embedding == "mask-row" %}, which wants the whole embedding table{% endif %}:

```sh
{% if config.embedding == "mask-row" -%}
peagle export {{ repo_id }} head-for-vllm --to vllm --target {{ local }}
{% endif -%}
vllm serve {{ served }} --speculative-config '{{ speculative | tojson }}'
```
"""


class Measured(NamedTuple):
    """A recorded acceptance length."""

    dataset: str
    k: int
    length: float


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
    folder, api = Path(folder).expanduser(), api or HfApi()
    if not folder.is_dir():
        raise InputError(f"head {folder}: no such folder")
    config = read_config(folder)
    read_tensors(folder)
    if not (api.token or get_token()):
        raise InputError("no Hugging Face token: run `hf auth login` or set HF_TOKEN")
    with tempfile.TemporaryDirectory() as name:
        staged = Path(name)
        for file in (file for pattern in FILES for file in folder.glob(pattern)):
            (staged / file.name).symlink_to(file.resolve())
        try:
            repo_id = api.create_repo(repo_id, private=private or None, exist_ok=True).repo_id
            if not (folder / "README.md").is_file():
                (staged / "README.md").write_text(str(model_card(config, repo_id)))
            if revision is not None:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo_id, folder_path=staged, revision=revision, commit_message=message
            )
        except HfHubHTTPError as error:
            why = REFUSED.get(error.response.status_code, first_line(error))
            code = error.response.status_code
            raise InputError(f"{repo_id}: {api.endpoint} answers {code}: {why}") from error
        except HFValidationError as error:
            raise InputError(f"{repo_id!r} is no repository: name owner/name") from error
        except (HTTPError, OSError) as error:
            why = f"{api.endpoint} cannot be reached ({first_line(error)})"
            raise InputError(f"{repo_id}: {why}") from error
        except (RuntimeError, ValueError) as error:  # of the upload itself
            raise InputError(f"{repo_id}: {first_line(error)}") from error
    return str(commit.commit_url)


def model_card(config: DrafterConfig, repo_id: str) -> ModelCard:
    """What the head says of itself. No licence: nobody recorded one."""
    kind, how = KINDS[config.method]
    trained = config.provenance.target
    base = _hub_id(trained)
    data = ModelCardData(
        base_model=base,
        library_name="peagle",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "eagle3", *(["p-eagle"] if kind == "P-EAGLE" else [])],
    )
    vllm_head = "head-for-vllm" if config.embedding == "mask-row" else repo_id
    speculative: dict[str, Any] = {"method": "eagle3", "model": vllm_head}
    speculative["num_speculative_tokens"] = config.depths or 7
    if config.method == "p-eagle":
        speculative["parallel_drafting"] = True
    return ModelCard.from_template(
        data,
        template_str=CARD,
        config=config,
        repo_id=repo_id,
        kind=kind,
        how=how,
        target=base or Path(trained).name,  # not where somebody keeps it
        served=base or "TARGET",
        local=trained if trained in load_catalog() else base or "TARGET",
        speculative=speculative,
        measured=_measured(config.provenance.acceptance),
    )


def _hub_id(target: str) -> str | None:
    """The hub repository of a target's name; None for folders, files and packages."""
    entry = load_catalog().get(target)
    known = entry.target if entry else target
    if not isinstance(known, str) or Path(known).expanduser().exists():
        return None
    hub_id = known.partition("@")[0]
    return hub_id if hub_id.count("/") == 1 and not hub_id.startswith((".", "/", "~")) else None


def _measured(acceptance: dict[str, Any]) -> list[Measured]:
    """Recorded by data set: one measurement with its K, or lengths by K."""
    rows = []
    for dataset, found in acceptance.items():
        by_k = {found["k"]: found["acceptance_length"]} if "k" in found else found
        rows += [Measured(dataset, int(k), float(length)) for k, length in by_k.items()]
    return rows
