"""Another chat template, none at all, and arguments for it."""

from pathlib import Path

import pytest
from refusals import refused
from tiny import make_tokenizer

from peagle.data.chat import encode_documents, prompt_ids
from peagle.model.loader import load_tokenizer
from peagle.model.template import check_template, check_template_args, use_template

TALK = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": " sat"}]


def test_a_tokenizer_without_the_weights(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert load_tokenizer(str(tmp_path)).chat_template == make_tokenizer().chat_template


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with refused("target"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_of_another_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistral's own class: refused here as where the target is loaded, with its name."""

    class MistralCommonBackend:
        chat_template = "{{ messages }}"

    other = MistralCommonBackend()
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: other)
    (tmp_path / "config.json").write_text("{}")
    with refused("target") as error:
        load_tokenizer(str(tmp_path))
    assert "MistralCommonBackend" in error.value.why


def test_a_template_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, file = make_tokenizer(), tmp_path / "chat.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (str(file), "~/chat.jinja"):
        tokenizer.chat_template = None
        use_template(tokenizer, name)
        assert tokenizer.decode(prompt_ids(tokenizer, TALK)) == "[the cat][ sat]"
    with refused("chat_template"):
        use_template(tokenizer, str(tmp_path / "none.jinja"))


def test_its_own_template_stays_and_none_is_named() -> None:
    tokenizer = make_tokenizer()
    own = tokenizer.chat_template
    use_template(tokenizer, None)
    assert tokenizer.chat_template == own
    check_template(tokenizer)
    for nothing in (None, ""):
        tokenizer.chat_template = nothing
        with refused():
            check_template(tokenizer)


def test_plain_text_is_continued() -> None:
    tokenizer = make_tokenizer()
    use_template(tokenizer, "plain")
    assert prompt_ids(tokenizer, TALK[:1]) == tokenizer("the cat")["input_ids"]
    [(ids, supervised)] = encode_documents(tokenizer, TALK)
    assert tokenizer.decode([i for i, mine in zip(ids, supervised, strict=True) if mine]) == " sat"


def test_plain_text_begins_as_the_tokenizer_begins_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, real = make_tokenizer(), type(make_tokenizer()).__call__

    def with_bos(self, text: str, add_special_tokens: bool = True, **more: object) -> object:
        start = self.bos_token if add_special_tokens else ""
        return real(self, start + text, add_special_tokens=False, **more)

    monkeypatch.setattr(type(tokenizer), "__call__", with_bos)
    use_template(tokenizer, "plain")
    ids = prompt_ids(tokenizer, TALK[:1])
    assert ids[0] == tokenizer.bos_token_id
    assert ids == tokenizer("the cat")["input_ids"]


@pytest.mark.parametrize("name", ["think", "add_generation_prompt", "tools"])
def test_arguments_that_the_template_does_not_read(name: str) -> None:
    tokenizer = make_tokenizer()
    with refused("chat_template_arg"):
        check_template_args(tokenizer, {name: True})
    tokenizer.chat_template += "{{ thinking }}"
    check_template_args(tokenizer, {"thinking": True})
