"""`peagle chat`: a conversation in the terminal."""

from typing import Annotated

from peagle.cli.common import ModelOptions, TargetArgument, check_answered, console, open_llm
from peagle.cli.generate import last_line, show
from peagle.cli.options import App, Fields
from peagle.data.chat import Message, prompt_ids
from peagle.engine.params import SamplingParams
from peagle.model.template import check_template

app = App()
SAMPLING = Fields("temperature", "top_p", "top_k", "min_p", "seed", max_tokens=512)


@app.command()
def chat(
    target: TargetArgument,
    model: ModelOptions,
    sampling: Annotated[SamplingParams, SAMPLING],
) -> None:
    """Chat with a model. An empty line or the end of input ends the conversation."""
    llm = open_llm(target, model)
    check_template(llm.tokenizer)  # before anything is typed
    history: list[Message] = []
    while said := _read():
        history.append({"role": "user", "content": said})
        run = llm.stream([prompt_ids(llm.tokenizer, history)], sampling)
        show(run)
        check_answered(run)
        console.print(f"[dim]{last_line(llm, run, model)}[/]")
        history.append({"role": "assistant", "content": run.completions()[0].text})


def _read() -> str:
    try:
        return console.input("[bold]> [/]").strip()
    except EOFError:
        return ""
