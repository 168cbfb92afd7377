"""`peagle export`: a head for vLLM, or in the speculators dialect."""

from pathlib import Path
from typing import Annotated

import typer

from peagle.cli.common import ChatTemplateOption, ForceOption, HeadArgument, open_target, screen
from peagle.cli.options import App
from peagle.errors import InputError
from peagle.files import check_folder, writing
from peagle.methods.checkpoint import read_config
from peagle.methods.load import head_folder, load_drafter
from peagle.methods.save import save_drafter
from peagle.tools.card import write_card

app = App()


@app.command()
def export(
    head: HeadArgument,
    output: Annotated[
        Path, typer.Argument(help="New folder to write the head to.", show_default=False)
    ],
    to: str,
    target: str | None = None,
    chat_template: ChatTemplateOption = None,
    force: ForceOption = False,
) -> None:
    """Write a head in a format that vLLM serves, with the target's embedding where needed.

    to: Checkpoint format to write: vllm or speculators.
    target: Target model of the head. Default: the one it was trained for.
    """
    if to not in ("vllm", "speculators"):
        raise InputError("choose vllm or speculators", field="to", value=to)
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise InputError(
            "is not an empty folder", field="output", value=output, fix="name a new one"
        )
    name = target or read_config(head_folder(head)).provenance.target
    if not name:
        why = "its config does not name the target it was trained for"
        raise InputError(why, field="head", value=head, fix="name it with `target`")
    check_folder(output)
    drafter = load_drafter(head, open_target(name, chat_template), force=force)
    with writing(output):
        save_drafter(drafter, output, to, dtype=None)  # type: ignore[arg-type]
        write_card(output)
    screen.print(f"wrote {output} ({to})")
