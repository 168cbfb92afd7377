"""`--chat-template` wherever a conversation is written: another template, plain text, or none."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from json_files import read_json, read_lines, write_lines
from runner import invoke, printed, save_target

OTHER = (
    "{% for m in messages %}{{ m.role }}:\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
TALK = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on the mat"}]
SMALL = ("--layers", 1, "--depths", 2, "--draft-vocab", 100, "--steps", 1)
SHORT = ("--max-tokens", 4)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target without a chat template."""
    folder = save_target(tmp_path_factory.mktemp("bare"))
    (folder / "chat_template.jinja").unlink()
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    (folder / "other.jinja").write_text(OTHER)
    return {
        "template": folder / "other.jinja",
        "talks": write_lines(folder / "talks.jsonl", *[{"messages": TALK}] * 2),
        "prompts": write_lines(folder / "prompts.jsonl", {"turns": ["the cat"]}),
    }


@pytest.fixture(scope="module")
def plain_head(
    bare: Path, files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    output = tmp_path_factory.mktemp("plain")
    how = ("--data", files["talks"], "--output", output, "--chat-template", "plain", *SMALL)
    invoke("train", bare, *how)
    return output / "head"


def recorded(head: Path) -> str:
    return read_json(head / "config.json")["peagle"]["provenance"]["template_hash"]


def test_another_template_is_the_targets_own(
    refused: Any, target: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    """Data, head and what is decoded with it have one template; without it the head is refused."""
    how, head = ("--chat-template", files["template"]), tmp_path / "run" / "head"
    data = ("--data", files["talks"], "--output", tmp_path / "run", *SMALL)
    invoke("train", target, *data, *how)
    assert recorded(head) == sha256(OTHER.encode()).hexdigest()[:16]
    show = ("data", "show", files["talks"], "--target", target, "--record", 1)
    start = "user:\nthe cat<|im_end|>assistant:\n"
    assert printed(*show, *how)["documents"][0]["pieces"][0]["text"] == start

    eval_ = ("--dataset", files["prompts"], "--k", 1, "--no-timing", *SHORT)
    generate = ("generate", target, "the cat", "--head", head, *SHORT)
    synth = ("--count", 1, *SHORT)
    regenerate = ("--prompts", files["prompts"], "--output", tmp_path / "made.jsonl", *SHORT)
    for command in (
        generate,
        ("eval", target, "--head", head, *eval_),
        ("data", "regenerate", target, "--head", head, *regenerate),
        ("data", "synth", target, "--head", head, "--output", tmp_path / "s.jsonl", *synth),
        ("export", head, tmp_path / "exported", "--to", "vllm", "--target", target),
    ):
        line = refused(*command)
        assert "name the template it was trained with (--chat-template); --force accepts" in line
        invoke(*command, *how)
    assert invoke("chat", target, "--head", head, *SHORT, *how, stdin="the cat\n").stdout
    assert "chat template" in invoke("doctor", head, target, *how).stdout
    [line] = read_lines(tmp_path / "made.jsonl")
    raw = ("generate", target, start, "--raw", *SHORT)
    assert printed(*raw)["token_ids"] == line["answer_ids"] == printed(*generate, *how)["token_ids"]


def test_a_capture_has_the_template_it_was_made_with(
    refused: Any, target: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    how, made = ("--chat-template", files["template"]), tmp_path / "captured"
    invoke("data", "capture", target, "--data", files["talks"], "--output", made, *how)
    train = ("train", target, "--data", made, "--output", tmp_path / "run", *SMALL)
    line = refused(*train)
    assert "captured with another chat template" in line and "--chat-template" in line
    invoke(*train, *how)
    assert recorded(tmp_path / "run" / "head") == sha256(OTHER.encode()).hexdigest()[:16]


def test_a_target_without_one_is_refused(
    refused: Any, bare: Path, plain_head: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    talks, output = ("--data", files["talks"]), ("--output", tmp_path / "new")
    prompts = ("--prompts", files["prompts"])
    dataset = ("--dataset", files["prompts"], "--head", plain_head, "--force", "--k", 1)
    for command in (
        ("train", bare, *talks, *output),
        ("data", "capture", bare, *talks, *output),
        ("data", "regenerate", bare, *prompts, *output),
        ("data", "synth", bare, *output),
        ("data", "show", files["talks"], "--target", bare),
        ("data", "show", files["talks"], "--target", bare, "--record", 1),
        ("generate", bare, "the cat"),
        ("chat", bare),
        ("eval", bare, *dataset),
    ):
        line = refused(*command)
        assert "has no chat template; name a Jinja file with --chat-template, or plain" in line
        assert ("; --raw continues the text" in line) == (command[0] == "generate")


def test_plain_text(bare: Path, plain_head: Path, files: dict[str, Path], tmp_path: Path) -> None:
    plain, made = ("--chat-template", "plain"), tmp_path / "made.jsonl"
    how = ("--prompts", files["prompts"], "--output", made, "--head", plain_head, *SHORT)
    invoke("data", "regenerate", bare, *how, *plain)
    [document] = printed("data", "show", made, "--target", bare, "--record", 1)["documents"]
    assert document["pieces"][0] == {"text": "the cat", "supervised": False}
    ask = ("generate", bare, "the cat", *SHORT)
    said = [printed(*ask, *option)["token_ids"] for option in (plain, ("--raw",))]
    assert said[0] == said[1] == document["ids"][-4:]
    assert "nothing differs" in invoke("doctor", plain_head, bare, *plain).stdout


def test_exact_tokens_need_no_template(bare: Path, answers: Path, tmp_path: Path) -> None:
    invoke("train", bare, "--data", answers, "--output", tmp_path / "run", *SMALL)
    assert recorded(tmp_path / "run" / "head") == ""


def test_a_file_that_is_not_there_or_no_template(
    refused: Any, target: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    ask = ("generate", target, "the cat", "--chat-template")
    refused(*ask, "none.jinja", field="chat_template")
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% if %}")
    assert "the chat template refuses this: " in refused(*ask, broken)
