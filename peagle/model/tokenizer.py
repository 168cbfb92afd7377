"""Tokenizers in the user's cache, as transformers built them: it takes seconds for a large one."""

import hashlib
import json
from pathlib import Path

import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from peagle.files import keep, sha256
from peagle.model.described import Described
from peagle.paths import cache_dir

SOURCES = ("*.json", "*.jinja", "additional_chat_templates/*.jinja")
# A tokenizer is its tokenizer.json, its named special tokens, and these.
FACTS = (
    "chat_template", "response_template", "chat_control_tokens", "extra_special_tokens",
    "clean_up_tokenization_spaces", "split_special_tokens", "add_prefix_space",
    "model_input_names", "model_max_length", "padding_side", "truncation_side",
)  # fmt: skip
VERSIONS = (FACTS, transformers.__version__, tokenizers.__version__)


def build_tokenizer(folder: Path, config: Described | None) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder. One that is made of a tokenizer.json is kept: the next start reads
    it without its own class. Raises as transformers does."""
    file = cache_dir() / "tokenizers" / f"{_key(folder)}.json"
    if (kept := _read(file)) is not None:
        return kept
    settings = folder / "tokenizer_config.json"
    if not settings.is_file() or b'"tokenizer_class"' not in settings.read_bytes():
        config = None  # its own class decides
    built = transformers.AutoTokenizer.from_pretrained(folder, config=config)
    if (folder / "tokenizer.json").is_file():
        _keep(file, built)
    return built


def _key(folder: Path) -> str:
    """A digest of all that decides what is built."""
    digest = hashlib.sha256(repr(VERSIONS).encode())
    for pattern in SOURCES:
        for file in sorted(folder.glob(pattern)):
            digest.update(f"{file.name} {sha256(file)}\n".encode())
    return digest.hexdigest()[:16]


def _read(file: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a file; None where it is missing or damaged."""
    try:
        facts = json.loads(file.with_suffix(".facts").read_text())
        if facts.pop("sha256") != sha256(file):
            return None
        return PreTrainedTokenizerFast(tokenizer_file=str(file), **facts)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _keep(file: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a tokenizer whose class has no code but that which builds it."""
    own = [kind for kind in type(tokenizer).mro() if not issubclass(PreTrainedTokenizerFast, kind)]
    code = {name for kind in own for name, part in vars(kind).items() if hasattr(part, "__get__")}
    if code <= {"__init__"}:
        known = [name for name in FACTS if hasattr(tokenizer, name)]  # not in all versions
        facts = {name: getattr(tokenizer, name) for name in known} | tokenizer.special_tokens_map
        text = tokenizer.backend_tokenizer.to_str()
        digest = hashlib.sha256(text.encode()).hexdigest()
        keep(file, text)
        keep(file.with_suffix(".facts"), json.dumps(facts | {"sha256": digest}))
