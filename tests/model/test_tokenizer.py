"""Kept tokenizers equal those that transformers builds, and bad files do no harm."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from json_files import change_json
from refusals import refused
from tiny import CHATML, CORPUS, make_tokenizer
from tokenizers import AddedToken, Tokenizer, models, trainers
from transformers import (
    AutoTokenizer,
    CodeLlamaTokenizer,
    GemmaTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)

from peagle.engine.text import TextStream
from peagle.model import tokenizer as kept
from peagle.model.loader import read_tokenizer

TEXTS = (
    "the cat sat", "", " ", "  two  spaces ,  and a stop . ", "\ttabs\nlines\r\n\n", "1234567",
    "don't he'll", "naïve café ﬁ e\u0301", "日本語のテキスト", "👩‍👩‍👧 emoji 🙂", "\x00\x7f\ufffd",
    "<s>the</s><unk>", "<|im_start|>user\nthe cat<|im_end|>", "<bos>the<eos>", "a<call>b", "▁▁",
    "the cat sat on the mat and then the other cat ran" * 3,
)  # fmt: skip
LLAMA = ["<unk>", "<s>", "</s>"]
CHAT = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "<s>sat"}]
# Of a tokenizer's state: compared as JSON and text, or read only while it is built.
STATE = {
    "_tokenizer", "_vocab", "_merges", "_special_tokens_map", "_extra_special_tokens",
    "init_kwargs", "name_or_path", "vocab_file", "legacy", "use_default_system_prompt",
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of kept tokenizers of an empty cache."""
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "tokenizers"


def spelled(special: list[str]) -> dict[str, Any]:
    """Vocabulary and merges over the words of a corpus, with bytes for other characters."""
    backend = Tokenizer(models.BPE(byte_fallback=True))
    words = [*special, *(f"<0x{number:02X}>" for number in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=words, show_progress=False)
    backend.train_from_iterator([CORPUS.replace(" ", "▁")] * 3, trainer)
    model = json.loads(backend.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(merge) for merge in model["merges"]]}


def byte_level() -> dict[str, Any]:
    model = json.loads(make_tokenizer().backend_tokenizer.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(merge) for merge in model["merges"]]}


def many_facts() -> PreTrainedTokenizerBase:
    """A tokenizer with all that a folder may say of one."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer().backend_tokenizer,
        eos_token="<|im_end|>", bos_token="<|endoftext|>", add_bos_token=True, add_eos_token=True,
        extra_special_tokens={"image_token": "<|reserved_0|>"}, padding_side="left",
        clean_up_tokenization_spaces=True, model_max_length=77, split_special_tokens=True,
        response_template={"fields": {}}, chat_control_tokens=["<|im_end|>"],
        model_input_names=["input_ids"],
    )  # fmt: skip
    made.add_special_tokens({"extra_special_tokens": ["<|reserved_1|>", AddedToken("<tool>")]})
    made.chat_template = {"default": CHATML, "tool_use": CHATML + "tools"}
    made.add_tokens([AddedToken("<call>", normalized=False), AddedToken(" on", lstrip=True)])
    return made


MADE: dict[str, tuple[str, Callable[[], PreTrainedTokenizerBase]]] = {
    "plain": ("llama", make_tokenizer),
    "facts": ("llama", many_facts),
    "llama": ("llama", lambda: LlamaTokenizer(**spelled(LLAMA))),
    "bos": ("llama", lambda: LlamaTokenizer(**spelled(LLAMA), add_bos_token=True)),
    "gemma": (
        "gemma3_text",
        lambda: GemmaTokenizer(**spelled(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"])),
    ),
    "qwen": ("qwen2", lambda: Qwen2Tokenizer(**byte_level(), add_bos_token=False)),
}  # fmt: skip


def saved(folder: Path, model_type: str, tokenizer: PreTrainedTokenizerBase) -> Path:
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "model", "llama", many_facts())


def not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", None)


def read(folder: Path) -> PreTrainedTokenizerBase:
    """As for described targets."""
    config: Any = SimpleNamespace(**json.loads((folder / "config.json").read_text()))
    return read_tokenizer("tiny", folder, config)


def streamed(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer, ())
    return [*(stream.push(token)[0] for token in ids), stream.finish()]


def results(tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...] = TEXTS) -> dict[str, Any]:
    """A tokenizer's state, and what it makes of texts and of a conversation."""
    found: dict[str, Any] = {"state": {k: v for k, v in vars(tokenizer).items() if k not in STATE}}
    found |= {"json": tokenizer.backend_tokenizer.to_str(), "named": tokenizer.special_tokens_map}
    found |= {"special": tokenizer.all_special_ids, "added": tokenizer.added_tokens_decoder}
    found |= {"size": len(tokenizer), "vocab": tokenizer.get_vocab()}
    found["extra"] = tokenizer.extra_special_tokens
    for text in texts:
        for special in (True, False):
            how = {"add_special_tokens": special, "return_offsets_mapping": True}
            encoded = dict(tokenizer(text, **how))
            ids = encoded["input_ids"]
            decoded = [tokenizer.decode(ids, skip_special_tokens=skip) for skip in (True, False)]
            found[f"{special} {text}"] = [encoded, decoded, streamed(tokenizer, ids)]
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        for way in (True, False):
            how = {"tools": tools, "add_generation_prompt": way}
            found[f"{tools} {way}"] = [
                tokenizer.apply_chat_template(CHAT, tokenize=False, **how),
                dict(tokenizer.apply_chat_template(CHAT, **how)),
            ]
    return found


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("name", MADE)
def test_a_kept_tokenizer_equals_a_built_one(
    name: str, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the config decides the class, as the tokenizer's own names none."""
    model_type, make = MADE[name]
    folder = saved(tmp_path / name, model_type, make())
    if not named:
        change_json(folder / "tokenizer_config.json", tokenizer_class=None)
    wanted = results(AutoTokenizer.from_pretrained(folder))
    assert results(read(folder)) == wanted
    not_built(monkeypatch)
    found = results(read(folder))
    assert found.keys() == wanted.keys()
    for part, value in wanted.items():
        assert found[part] == value, part


def test_a_class_with_code_of_its_own_is_built_every_time(tmp_path: Path, cache: Path) -> None:
    tokenizer = CodeLlamaTokenizer(**spelled(LLAMA))
    folder = saved(tmp_path / "code", "code_llama", tokenizer)
    assert type(read(folder)) is type(read(folder)) is CodeLlamaTokenizer
    assert not cache.exists()


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_changed_folder_is_built_again(folder: Path, cache: Path, file: str) -> None:
    read(folder)
    with (folder / file).open("a") as changed:
        changed.write("\n")
    read(folder)
    assert len(list(cache.glob("*.json"))) == 2


def test_other_version_rebuilds(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(folder)
    monkeypatch.setattr(kept, "VERSIONS", ("other",))
    read(folder)
    assert len(list(cache.glob("*.json"))) == 2


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def of_another(file: Path) -> None:
    file.write_text(make_tokenizer().backend_tokenizer.to_str().replace("cat", "tac"))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink, "empty": lambda file: file.write_text(""), "cut short": cut,
    "bytes": lambda file: file.write_bytes(b"\xff\xfe"), "list": lambda file: file.write_text("[]"),
    "no digest": lambda file: file.write_text("{}"), "of another": of_another,
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("suffix", [".json", ".facts"])
def test_a_damaged_file_is_written_again(
    folder: Path, cache: Path, suffix: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = results(read(folder), ("the cat",))
    [file] = cache.glob(f"*{suffix}")
    DAMAGES[damage](file)
    assert results(read(folder), ("the cat",)) == wanted
    not_built(monkeypatch)
    assert results(read(folder), ("the cat",)) == wanted
    assert len(list(cache.iterdir())) == 2


def test_a_fact_that_transformers_does_not_know(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before transformers 5.20, whose tokenizers have no `chat_control_tokens`."""
    monkeypatch.setattr(kept, "FACTS", (*kept.FACTS, "of_a_later_version"))
    wanted = results(read(folder), ("the cat",))
    not_built(monkeypatch)
    assert results(read(folder), ("the cat",)) == wanted
    assert len(list(cache.iterdir())) == 2


def test_a_cache_that_cannot_be_written(folder: Path, cache: Path) -> None:
    cache.parent.mkdir()
    cache.touch()
    assert results(read(folder)) == results(AutoTokenizer.from_pretrained(folder))


def test_a_full_disk(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("peagle.files.os.fsync", full)
    assert results(read(folder)) == results(AutoTokenizer.from_pretrained(folder))
    assert list(cache.iterdir()) == []


def test_a_damaged_tokenizer_is_named(folder: Path, cache: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with refused("target"):
        read(folder)
    assert not cache.exists()
