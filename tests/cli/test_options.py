"""Options made from dataclasses, and fields named by their flags in messages."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from refusals import refused
from typer.main import get_command
from typer.testing import CliRunner

from peagle.cli.common import screen
from peagle.cli.main import _warnings_in_a_line
from peagle.cli.options import App, Fields, given
from peagle.cli.settings import ConfigOption
from peagle.errors import InputError, InputWarning, check_at_least


@dataclass(frozen=True, slots=True)
class Cake:
    """A cake to bake.

    Shop:
    shop: Folder of the shop.

    Taste:
    kind: Kind of the cake; see `max_size`.
    max_size: Largest size. Default: any.
    sugar: Amount of sugar.
    round: Make it round and not square.
    iced: Put ice on it.
    warm: Warm it up. Default: in winter.
    layers: Layers to fill, as 1,2.
    words: Words to write on it.
    """

    shop: Path
    kind: Literal["plum", "apple"] = "plum"
    max_size: int | None = None
    sugar: float = 6e-4
    round: bool = True
    iced: bool = False
    warm: bool | None = None
    layers: tuple[int, ...] | None = None
    words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.sugar < 0:
            raise InputError(
                "must be at least 0", field="sugar", value=self.sugar, fix="or name `kind`, `spoon`"
            )
        if "" in self.words:
            raise InputError("must not be empty, as `kind`", field="words[1]", value="`kind`")


app = App()
seen: list[Any] = []


@app.command()
def bake(
    context: typer.Context,
    *,
    cake: Cake,
    spoons: int = 2,
    config: ConfigOption = None,
) -> None:
    """Bake a cake.

    Kitchen:
    spoons: Number of spoons, which
        may be of any size.
    """
    check_at_least(1, spoons=spoons)
    if spoons > 8:
        warnings.warn(InputWarning("more than `spoons` is `max_size`"), stacklevel=2)
    seen.append((cake, spoons, given(context, "sugar")))


def bake_with(*args: object) -> tuple[Cake, int, bool]:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if isinstance(result.exception, InputError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return seen.pop()


def test_defaults_are_the_dataclass() -> None:
    assert bake_with("--shop", "a") == (Cake(Path("a")), 2, False)


def test_every_kind_of_field() -> None:
    flags = ("--kind", "apple", "--max-size", 3, "--sugar", 1, "--no-round", "--iced", "--no-warm")
    cake, _, told = bake_with("--shop", "a", *flags, "--layers", "1,2", "--words", "hi")
    assert cake == Cake(Path("a"), "apple", 3, 1.0, False, True, False, (1, 2), ("hi",))
    assert told
    assert bake_with("--shop", "a", "--max-size", "auto")[0].max_size is None


def test_help_has_type_text_and_default() -> None:
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["--help"]).output
    assert "Folder of the shop. Required." in shown
    assert "Kind of the cake; see --max-size. [default: plum]" in " ".join(shown.split())
    for pair in (("--round", "--no-round"), ("--warm", "--no-warm"), ("--iced",)):
        assert all(flag in shown for flag in pair)
    assert "--no-iced" not in shown and "0.0006" in shown


def test_help_has_panels() -> None:
    """Panels come from the dataclass's docstring, and from annotations."""
    params = get_command(app).params
    panels = {each.name: getattr(each, "rich_help_panel", None) for each in params}
    assert panels["shop"] == "Shop" and panels["spoons"] == "Kitchen"
    assert {panels[name] for name in ("kind", "sugar", "round", "words")} == {"Taste"}
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["--help"]).output
    assert all(f"─ {panel} ─" in shown for panel in ("Shop", "Taste", "Kitchen"))


def test_a_command_takes_some_fields_with_its_own_defaults() -> None:
    small = App()

    @small.command()
    def make(cake: Annotated[Cake, Fields("kind", shop=Path("here"))]) -> None:
        seen.append(cake)

    assert CliRunner().invoke(small, ["--kind", "apple"]).exit_code == 0
    assert seen.pop() == Cake(Path("here"), "apple")
    assert CliRunner().invoke(small, ["--sugar", "1"]).exit_code == 2


def test_a_parameter_before_the_star_is_an_argument() -> None:
    small = App()

    @small.command()
    def make(cake: str, *, spoons: int = 2) -> None:
        """Make.

        cake: Name of the cake.
        spoons: Number of spoons.
        """
        seen.append((cake, spoons))

    cake, spoons = get_command(small).params[:2]
    assert (cake.param_type_name, cake.help) == ("argument", "Name of the cake.")
    assert (spoons.param_type_name, spoons.help) == ("option", "Number of spoons.")
    assert CliRunner().invoke(small, ["plum", "--spoons", "3"]).exit_code == 0
    assert seen.pop() == ("plum", 3)


@pytest.mark.parametrize(
    ("args", "field", "said"),
    [
        ((), "shop", "--shop: is missing; name a folder of the shop"),
        (("--spoons", 0), "spoons", "--spoons 0: must be a whole number of at least 1"),
        (("--layers", "x"), "layers", "--layers 'x': expected whole numbers separated by commas"),
        (("--sugar", -1), "sugar", "--sugar -1.0: must be at least 0; or name --kind, `spoon`"),
        (("--words", ""), "words[1]", "--words[1] '`kind`': must not be empty, as --kind"),
        (("--kind", "pear"), "kind", "--kind 'pear': choose plum or apple"),
    ],
)
def test_errors_name_flags_of_the_command(args: tuple[object, ...], field: str, said: str) -> None:
    shop = ("--shop", "a") if args else ()
    with refused(field) as error:
        bake_with(*shop, *args)
    assert str(error.value) == said


def test_warnings_name_flags_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "soft_wrap", True)
    with screen.capture() as shown, _warnings_in_a_line():
        bake_with("--shop", "a", "--spoons", 9)
    assert shown.get() == "warning: more than --spoons is --max-size\n"


def test_settings_from_a_file_and_options_in_rising_order(tmp_path: Path) -> None:
    file = tmp_path / "cake.yaml"
    file.write_text(
        "shop: a\nspoons: 5\nlayers: [1, 2]\nround: false\nmax_size: auto\nsugar: null\n"
        "warm: true\nwords: [hi, there]\n"
    )
    cake, spoons, told = bake_with("--config", file)
    assert cake == Cake(Path("a"), round=False, warm=True, layers=(1, 2), words=("hi", "there"))
    assert (spoons, told) == (5, False)
    assert bake_with("--config", file, "--spoons", 7)[1] == 7


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell expands it in --shop=~/a, or in a file; that of nobody stays."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "cake.yaml").write_text("shop: ~/a\n")
    for options in (("--shop", "~/a"), ("--shop=~/a",), ("--config=~/cake.yaml",)):
        assert bake_with(*options)[0].shop == tmp_path / "a"
    assert bake_with("--shop", "~no-such-user/a")[0].shop == Path("~no-such-user/a")


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("spons: 3", "spons"),
        ("config: 3", "config"),
        ("spoons: two", "spoons"),
        ("warm: perhaps", "warm"),
        ("sugar: much", "sugar"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, line: str, field: str) -> None:
    file = tmp_path / "cake.yaml"
    file.write_text(line)
    with refused(field) as error:
        bake_with("--config", file)
    assert field != "spons" or error.value.fix == "did you mean spoons?"


def test_help_of_a_parameter_is_in_the_docstring() -> None:
    command = typer.main.get_command(app)
    [spoons] = [param for param in command.params if param.name == "spoons"]
    assert spoons.help == "Number of spoons, which may be of any size."
    assert command.help == "Bake a cake."
