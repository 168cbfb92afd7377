"""Options made from commands' parameters and from dataclasses.

A parameter's type, its line of help and its default are an option's, or an argument's where it may
be given by its place (before `*`). Help is in the command's
docstring, in lines `name: A sentence.`; a longer one goes on indented. A parameter whose type is a
dataclass stands for an option for each of its fields, with their help in the dataclass's docstring.
A line `Panel:` in either begins a panel of --help. An option without help there has that of
help.txt. `Annotated` adds settings of Typer, such as the name of an environment variable.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial, wraps
from inspect import Parameter, Signature, cleandoc, signature
from itertools import pairwise
from os.path import expanduser
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from peagle.errors import InputError

FIELD = re.compile(r"`(\w+)`")  # a name in backticks, in a message or a line of help
NO_TEXT = re.compile("[\ud800-\udfff]")  # how Python has bytes that are no characters
ALONE = "[always|auto|never]"  # values of an option that may be given alone, as always
N = TypeVar("N", int, float)
Help = tuple[str, str | None]  # of an option: its text, "" for none, and its panel
INTERRUPTED = 130  # exit code of a command that Ctrl-C ended
RUNNING = ContextVar[TyperCommand | None]("the command that runs", default=None)


class Fields:
    """The fields of a dataclass that are options of a command; some with another default."""

    def __init__(self, *names: str, **defaults: Any) -> None:
        self.names = {*names, *defaults}
        self.defaults = defaults


class App(typer.Typer):
    """A Typer whose commands have options made from dataclasses, and name them in errors."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(add_completion=False, **settings)

    def command(self, name: str | None = None) -> Callable[..., Any]:  # type: ignore[override]
        register = super().command(name, cls=_Command)
        return lambda function: register(expanded(function))


class _Command(TyperCommand):
    """Names options by their flags in errors, where the core names fields."""

    def parse_args(self, ctx, args):  # type: ignore[no-untyped-def]
        with self._running():
            return super().parse_args(ctx, self._completed(args))

    def invoke(self, ctx):  # type: ignore[no-untyped-def]
        with self._running():
            for name, value in ctx.params.items():
                if isinstance(value, str | list | tuple) and NO_TEXT.search("".join(value)):
                    raise InputError("is not UTF-8 text", field=name, value=value)
            return super().invoke(ctx)

    def _completed(self, args: list[str]) -> list[str]:
        """The arguments with `always` after an option that takes it and is given alone."""
        alone = {param.opts[0] for param in self.params if param.metavar == ALONE}
        completed = []
        for word, following in pairwise([*args, ""]):
            completed.append(word)
            if word in alone and following not in ALONE.strip("[]").split("|"):
                completed.append("always")
        return completed

    @contextmanager
    def _running(self) -> Iterator[None]:
        before = RUNNING.set(self)
        try:
            yield
        except InputError as error:
            error.why = with_flags(error.why)
            error.fix = error.fix and with_flags(error.fix)
            error.args = (error.named(error.field and _flag_of(error.field)),)
            raise
        finally:
            RUNNING.reset(before)


def group_with_default(command: str) -> type[TyperGroup]:
    """A group for which `GROUP ARGUMENTS` is short for `GROUP COMMAND ARGUMENTS`."""

    class Group(TyperGroup):
        def parse_args(self, ctx, args):  # type: ignore[no-untyped-def]
            named = args[0] in (*self.commands, "--help") if args else self.no_args_is_help
            if not named:
                args = [command, *args]
            return super().parse_args(ctx, args)

    return Group


def with_flags(text: str) -> str:
    """The text with the flags of the running command in place of fields in backticks."""
    return FIELD.sub(lambda found: _flags().get(found[1], found[0]), text)


def _flag_of(field: str) -> str:
    """The flag of a field, or of a part of one (stop[1]); a field without a flag stays."""
    name, bracket, part = field.partition("[")
    return _flags().get(name, name) + bracket + part


def _flags() -> dict[str | None, str]:
    """Flags of the running command's options by their fields."""
    command = RUNNING.get()
    params = command.params if command is not None else []
    return {param.name: param.opts[0] for param in params if param.opts[0].startswith("--")}


def given(context: typer.Context, name: str) -> bool:
    """Return whether an option has a value that is not its default, by the command line or a
    settings file; a variable of the environment may be meant for another command."""
    source = context.get_parameter_source(name)
    return source is not None and source.name not in ("DEFAULT", "ENVIRONMENT")


def refuse_idle(context: typer.Context, names: Iterable[str], when: str) -> None:
    """Raise InputError for the first of these options that is given: it does nothing `when`."""
    for name in filter(partial(given, context), names):
        value = None if name == "api_key" else context.params[name]  # a key is never shown
        raise InputError(f"does nothing {when}", field=name, value=value, fix="leave it out")


def parse_list(text: str, field: str, kind: type[N], minimum: int = 0) -> tuple[N, ...]:
    """ "3,7" → (3, 7), of int or float."""
    try:
        parsed = tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        numbers = "whole numbers" if kind is int else "numbers"
        why = f"expected {numbers} separated by commas"
        raise InputError(why, field=field, value=text) from error
    if min(parsed) < minimum:
        raise InputError(f"each must be at least {minimum}", field=field, value=text)
    return parsed


def expanded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as Typer takes it: with options in place of dataclasses."""
    hints = get_type_hints(function, include_extras=True)
    own_help = documented(function)
    groups = dict[str, tuple[type, list[str]]]()
    options = list[Parameter]()
    for name, parameter in signature(function).parameters.items():
        kind, note = _plain(hints[name])
        if isinstance(kind, type) and is_dataclass(kind):
            members = _members(kind, note or Fields(*(field.name for field in fields(kind))))
            groups[name] = kind, [member.name for member in members]
            options += members
        else:
            about = own_help.get(name) or (_shared_help().get(name, ""), None)
            options.append(_option(name, hints[name], about, parameter.default, parameter.kind))

    @wraps(function)
    def run(**values: Any) -> Any:
        # No shell expands the ~ of --output=~/a, or that of a settings file.
        values |= {n: Path(expanduser(v)) for n, v in values.items() if isinstance(v, Path)}
        for name in values.keys() & hints.keys():
            _check_choice(name, hints[name], values[name])
        for name, (kind, names) in groups.items():
            values[name] = _build(kind, {field: values.pop(field) for field in names})
        return function(**values)

    first, (_, panel) = next(iter(own_help.items()), (None, (None, None)))
    text = cleandoc(function.__doc__ or "").split(f"\n{first}: ")[0]
    run.__doc__ = text.removesuffix(f"\n{panel}:").rstrip()
    run.__signature__ = Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def optional(hint: Any) -> tuple[Any, bool]:
    """A type without its None, and whether it had one."""
    if get_origin(hint) not in (Union, UnionType):
        return hint, False
    [kind] = [part for part in get_args(hint) if part is not NoneType]
    return kind, True


def _plain(hint: Any) -> tuple[Any, Any]:
    """A type without its annotation, and that: `Fields`, or settings of Typer; None for none."""
    return get_args(hint) if get_origin(hint) is Annotated else (hint, None)


def _members(kind: type, chosen: Fields) -> list[Parameter]:
    """Options for the fields of a dataclass; whether a required one is there is seen later."""
    hints = get_type_hints(kind, include_extras=True)
    own_help = documented(kind)
    options = []
    panel = None
    for field in fields(kind):
        text, panel = own_help.get(field.name) or (_shared_help().get(field.name, ""), panel)
        if field.name not in chosen.names:
            continue
        default = chosen.defaults.get(field.name, field.default)
        if default is MISSING:
            text = f"{text} Required."
            default = None
        options.append(_option(field.name, hints[field.name], (text, panel), default))
    return options


def documented(kind: Callable[..., Any]) -> dict[str, Help]:
    """Help of each field in a dataclass's docstring, or option in a command's."""
    found = dict[str, Help]()
    name = ""
    panel = None
    for line in cleandoc(kind.__doc__ or "").splitlines():
        start, colon, text = line.partition(":")
        if start in kind.__annotations__:
            name = start
            found[name] = text.strip(), panel
        elif name and line.startswith(" "):
            found[name] = f"{found[name][0]} {line.strip()}", panel
        else:
            name = ""
            panel = start if colon and not text else panel
    return found


@cache
def _shared_help() -> dict[str, str]:
    """Help of the options that several commands have, by their names."""
    lines = Path(__file__).with_name("help.txt").read_text().splitlines()
    return dict(line.split(": ", 1) for line in lines)


def _option(
    name: str, hint: Any, about: Help, default: Any, parameter: Any = Parameter.KEYWORD_ONLY
) -> Parameter:
    """A parameter as Typer takes it, with its help; one without help is unchanged."""
    kind, settings = _plain(hint)
    text, panel = about
    if text:
        if parameter is not Parameter.KEYWORD_ONLY:
            settings = settings or typer.Argument(show_default=False)
        elif settings is None:
            kind, settings = _typed(kind, flag(name), default)
        settings = copy(settings)
        settings.help = FIELD.sub(lambda found: flag(found[1]), text)
        settings.rich_help_panel = panel or settings.rich_help_panel
        hint = Annotated[kind, settings]
    if default == ():
        default = []
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def _typed(kind: Any, name: str, default: object) -> tuple[Any, Any]:
    """The type as Typer takes it, and the settings of an option of that type."""
    bare, is_optional = optional(kind)
    if bare is bool and default is not False:
        return kind, typer.Option(f"{name}/--no-{name.removeprefix('--')}")
    if bare is int and is_optional:
        return kind, typer.Option(name, parser=_whole_or_auto)
    if get_origin(bare) is tuple and get_args(bare)[0] is str:
        kind = list[str]
    elif get_origin(bare) in (tuple, Literal):
        kind = str | None if is_optional else str
    alone = get_origin(bare) is Literal and "always" in get_args(bare)
    return kind, typer.Option(name, metavar=ALONE if alone else None)


def _whole_or_auto(text: str | int) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a valid whole number") from error


def _check_choice(name: str, hint: Any, value: object) -> None:
    """Raises InputError for a value that the option's Literal does not have."""
    kind, _ = optional(_plain(hint)[0])
    if get_origin(kind) is Literal and value is not None and value not in get_args(kind):
        *others, last = get_args(kind)
        raise InputError(f"choose {', '.join(others)} or {last}", field=name, value=value)


def _build(kind: type, values: dict[str, Any]) -> Any:
    """A dataclass from its options' values. Raises InputError, also for a field that is missing."""
    hints = get_type_hints(kind)
    required = {field.name for field in fields(kind) if field.default is MISSING}
    for name, value in values.items():
        hint = hints[name]
        if value is None and name in required:
            note, _ = documented(kind)[name]
            fix = f"name a {note[0].lower()}{note[1:].rstrip('.')}"
            raise InputError("is missing", field=name, fix=fix)
        _check_choice(name, hint, value)
        if isinstance(value, list):
            values[name] = tuple(value)
        elif isinstance(value, str) and get_origin(optional(hint)[0]) is tuple:
            values[name] = parse_list(value, name, int)
    return kind(**values)
