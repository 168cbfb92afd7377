"""`peagle push`: a head onto the Hugging Face hub."""

from typing import Annotated

import typer

from peagle.cli.common import screen
from peagle.cli.options import App

app = App()


@app.command()
def push(
    head: Annotated[str, typer.Argument(help="Folder of the head to upload.", show_default=False)],
    repo_id: Annotated[
        str, typer.Argument(help="Hub repository to upload to, as owner/name.", show_default=False)
    ],
    private: Annotated[bool, "Make the repository private when it is created."] = False,
    revision: Annotated[
        str | None, "Branch to commit to, created when missing. Default: main."
    ] = None,
    message: Annotated[str, "Message of the commit."] = "Upload head",
) -> None:
    """Upload a head: config.json, tensors and README.md (written from its record when missing)."""
    from huggingface_hub.utils import disable_progress_bars

    from peagle.tools.hub import push_head

    if not screen.is_terminal:
        disable_progress_bars()
    typer.echo(push_head(head, repo_id, private=private, revision=revision, message=message))
