"""`peagle chat`: a conversation in the terminal."""

import typer

from peagle.cli.common import (
    ChatTemplateOption,
    DeviceOption,
    DtypeOption,
    ForceOption,
    HeadOption,
    KOption,
    MaxTokensOption,
    MethodOption,
    MinPOption,
    NoSpeculationOption,
    QuantizeOption,
    SeedOption,
    TargetArgument,
    TemperatureOption,
    TopKOption,
    TopPOption,
    check_answered,
    open_llm,
    sampling,
)
from peagle.cli.generate import console, last_line, show
from peagle.data.chat import Message, prompt_ids
from peagle.model.template import check_template

app = typer.Typer(add_completion=False)


@app.command()
def chat(
    target: TargetArgument,
    head: HeadOption = None,
    method: MethodOption = None,
    no_speculation: NoSpeculationOption = False,
    k: KOption = None,
    chat_template: ChatTemplateOption = None,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    min_p: MinPOption = 0.0,
    seed: SeedOption = None,
    max_tokens: MaxTokensOption = 512,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    quantize: QuantizeOption = None,
    force: ForceOption = False,
) -> None:
    """Chat with a model. An empty line or the end of input ends the conversation."""
    params = sampling(temperature, top_p, top_k, min_p, seed, max_tokens)
    llm = open_llm(
        target,
        head,
        method,
        k,
        no_speculation=no_speculation,
        dtype=dtype,
        device=device,
        quantize=quantize,
        force=force,
        chat_template=chat_template,
    )
    check_template(llm.tokenizer)  # before anything is typed
    history: list[Message] = []
    while said := _read():
        history.append({"role": "user", "content": said})
        run = llm.stream([prompt_ids(llm.tokenizer, history)], params)
        show(run)
        check_answered(run)
        console.print(f"[dim]{last_line(llm, run)}[/]")
        history.append({"role": "assistant", "content": run.completions()[0].text})


def _read() -> str:
    try:
        return console.input("[bold]> [/]").strip()
    except (EOFError, KeyboardInterrupt):
        return ""
