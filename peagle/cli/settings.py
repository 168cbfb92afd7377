"""Settings of a command from a YAML file, from name=value and of a recipe: they become its options'
defaults."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
import yaml

from peagle.cli.common import existing_file
from peagle.cli.options import optional
from peagle.errors import InputError, first_line

NOT_YAML = (yaml.YAMLError, UnicodeDecodeError, RecursionError)
TRUTH = {"true": True, "false": False}
EXPECTED = {int: "a whole number", float: "a number", bool: "true or false"}
RECIPES = yaml.safe_load(Path(__file__).with_name("recipes.yaml").read_text())


def _from_recipe(context: typer.Context, name: str | None) -> str | None:
    """Settings of a recipe; those of other sources take precedence and may be read first."""
    if name is not None:
        if name not in RECIPES:
            raise InputError(f"choose {' or '.join(RECIPES)}", field="recipe", value=name)
        context.default_map = RECIPES[name] | dict(context.default_map or {})
    return name


def _from_file(context: typer.Context, path: Path | None) -> None:
    if path is None:
        return
    try:
        loaded = yaml.safe_load(existing_file(path, "config").read_text())
    except NOT_YAML as error:
        why = f"not YAML ({first_line(error)})"
        raise InputError(why, field="config", value=path) from error
    if not isinstance(loaded, dict):
        raise InputError("expected name: value lines", field="config", value=path)
    _use(context, loaded)


def _from_words(context: typer.Context, words: list[str] | None) -> None:
    _use(context, read_pairs(words or [], "overrides", options=True))


def read_pairs(texts: Iterable[str], field: str, *, options: bool = False) -> dict[str, Any]:
    """["a=1"] → {"a": 1}, values as in YAML. Raises InputError of `field` for another text, and of
    the name for a value if names are `options`."""
    pairs: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.strip().partition("=")
        if not equals or not name or name in pairs:
            raise InputError("expected name=value, each name once", field=field, value=text)
        try:
            pairs[name] = yaml.safe_load(value)
        except NOT_YAML as error:
            wrong = name if options else field
            raise InputError(first_line(error), field=wrong, value=value) from error
    return pairs


RecipeOption = Annotated[
    str | None,
    typer.Option(
        help="Settings to begin with: paper, those of the P-EAGLE paper; --config and options take "
        "precedence. Default: each option's own.",
        rich_help_panel="Recipe",
        callback=_from_recipe,
        is_eager=True,
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        help="YAML file with settings of the same names; options take precedence.",
        rich_help_panel="Recipe",
        callback=_from_file,
        is_eager=True,
        expose_value=False,
    ),
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings as name=value, which take precedence over --config.",
        callback=_from_words,
        is_eager=True,
        expose_value=False,
    ),
]


def _use(context: typer.Context, pairs: Mapping[str, object]) -> None:
    """Make settings the defaults of the options of their names; null leaves an option alone."""
    known = _known(context)
    defaults = dict(context.default_map or {})
    for name, value in pairs.items():
        if name not in known:
            raise _unknown(str(name), known)
        if value is None:
            defaults.pop(name, None)
        else:
            defaults[name] = _typed(name, known[name], value)
    context.default_map = defaults


def _unknown(name: str, known: Iterable[str]) -> InputError:
    near = get_close_matches(name, known, n=1)
    fix = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
    return InputError("unknown setting", field=name, fix=fix)


def _known(context: typer.Context) -> dict[str, Any]:
    """Types of the command's options by name."""
    assert context.command.callback is not None
    parameters = signature(context.command.callback).parameters
    names = [p.name for p in context.command.params if p.opts[0].startswith("--")]
    types = {n: get_args(parameters[str(n)].annotation)[0] for n in names if n in parameters}
    return {name: optional(kind)[0] for name, kind in types.items() if name != "config"}


def _typed(name: str, kind: Any, value: object) -> object:
    """A setting from YAML, where 6e-4 is a text and layers are a list."""
    if kind == list[str]:
        return value if isinstance(value, list) else [str(value)]
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    if text == "auto" and kind in EXPECTED:
        return None
    try:
        if kind is bool:
            return TRUTH[text.lower()]
        return kind(text) if kind in EXPECTED else text
    except (ValueError, KeyError) as error:
        raise InputError(f"expected {EXPECTED[kind]}", field=name, value=text) from error
