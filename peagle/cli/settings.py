"""Settings of a command from a YAML file, and of a recipe: they become its options' defaults."""

from os.path import expanduser
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from peagle.catalog import did_you_mean
from peagle.cli.common import existing_file
from peagle.errors import InputError, first_line

RECIPES = yaml.safe_load(Path(__file__).with_name("recipes.yaml").read_text())


def _from_recipe(context: typer.Context, name: str | None) -> str | None:
    """Settings of a recipe; those of other sources take precedence and may be read first."""
    if name is not None:
        if name not in RECIPES:
            raise InputError(f"choose {' or '.join(RECIPES)}", field="recipe", value=name)
        context.default_map = RECIPES[name] | dict(context.default_map or {})
    return name


def _from_file(context: typer.Context, path: Path | None) -> None:
    """Settings of a file; null leaves an option alone."""
    if path is None:
        return
    path = existing_file(Path(expanduser(path)), "config")
    try:
        loaded = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # not UTF-8, no date
        raise InputError(f"not YAML ({first_line(error)})", field="config", value=path) from error
    if not isinstance(loaded, dict):
        raise InputError("expected name: value lines", field="config", value=path)
    options = {p.name: p for p in context.command.params if p.opts[0].startswith("--")}
    del options["config"]
    defaults = dict(context.default_map or {})
    for name, value in loaded.items():
        if name not in options:
            fix = did_you_mean(str(name), options) or f"choose from {', '.join(options)}"
            raise InputError("unknown setting", field=str(name), fix=fix)
        if value is not None:
            defaults[name] = _typed(context, options[name], value)
    context.default_map = defaults


def _typed(context: typer.Context, option: Any, value: object) -> object:
    """A setting as the option reads it from the command line, where a list is 1,2,3 or, of an
    option that may be repeated, several texts."""
    parts = value if isinstance(value, list) else [value]
    texts = [str(part) for part in parts]
    given = texts if option.multiple else ",".join(texts)
    try:
        return option.process_value(context, given)
    except typer.BadParameter as error:
        raise InputError(error.message, field=option.name, value=value) from error


RecipeOption = Annotated[str | None, typer.Option(callback=_from_recipe, is_eager=True)]
ConfigOption = Annotated[
    Path | None, typer.Option(callback=_from_file, is_eager=True, expose_value=False)
]
