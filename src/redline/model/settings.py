"""Settings are what a person can say. Each is declared once as the annotation of a field or a parameter.

The option of the command line with its help, the keyword argument, the key of a TOML file, the range check and the reference page
are all made from that one declaration:

    batch: Annotated[int | None, setting("Items per step. Default: the model's own.", short="-b", least=1)] = None
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from redline.model.errors import SpecError
from redline.model.fields import require_between, require_choice, require_range, require_seconds

WHAT, DATA, HOW, OUTPUT = "What is measured", "Data", "How it is measured", "Output"
WHICH, WAY = "Which records", "How it is done"


@dataclass(frozen=True)
class Setting:
    """This holds what is known of a setting beside its name, its type and its default."""

    doc: str
    short: str = ""
    """It is a second name on the command line, such as `-b`."""
    option: str = ""
    """It is the name on the command line where that is not the field's own."""
    group: str = HOW
    """The help shows the setting under this heading."""
    shape: str = ""
    """The help shows this for its value. By default it shows the choices or the type."""
    is_argument: bool = False
    """If True, it is a word of the command line that needs no option's name."""
    kind: Any = None
    """It is the type of what a person gives, where old records may hold another."""
    least: float | None = None
    most: float | None = None
    read: Callable[[str, Any], Any] | None = None
    """It turns the name and what a person wrote, such as 16GiB, into the value."""


def setting(doc: str, **known: Any) -> Setting:
    return Setting(doc, **known)


@dataclass(frozen=True)
class Declared:
    """This is a setting with its name, its type without None, and its default."""

    name: str
    kind: Any
    default: Any
    setting: Setting

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def option(self) -> str:
        return self.setting.option or f"--{self.name.replace('_', '-')}"

    @property
    def is_flag(self) -> bool:
        return self.kind is bool

    @property
    def takes_several(self) -> bool:
        return get_origin(self.kind) in (list, tuple)

    def check(self, value: Any) -> None:
        """Refuses a value outside of the choices or the range. The error names the setting, the rule and the value."""
        if value is None:
            return
        if self.choices:
            require_choice(self.name, value, self.kind)
        elif (
            self.kind is int
            and isinstance(value, int)
            and (self.setting.least is not None or self.setting.most is not None)
        ):
            require_range(self.name, value, int(self.setting.least or 0), int(self.setting.most or 2**63 - 1))
        elif self.kind is float and self.setting.most is not None:
            require_between(self.name, value, self.setting.least or 0, self.setting.most)
        elif self.kind is float and self.setting.least is not None:
            require_seconds(self.name, value, zero_too=self.setting.least == 0)


@cache
def settings_of(owner: Any) -> Mapping[str, Declared]:
    """Returns the settings that a spec class or a function declares, by name and in their order."""
    hints = get_type_hints(owner, include_extras=True)
    if isinstance(owner, type):
        defaults = {field.name: field.default for field in msgspec.structs.fields(owner)}
    else:
        defaults = {each.name: each.default for each in inspect.signature(owner).parameters.values()}
    found = {}
    for name, hint in hints.items():
        declared = next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Setting)), None)
        if declared is not None:
            default = defaults.get(name)
            known = default if default not in (msgspec.NODEFAULT, inspect.Parameter.empty) else None
            found[name] = Declared(name, declared.kind or plain_type(hint), known, declared)
    return found


def plain_type(kind: Any) -> Any:
    """Returns a field's type without what is written beside it and without None, or text where several types are possible."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) in (Union, types.UnionType):
        kinds = [each for each in get_args(kind) if each is not type(None)]
        return kinds[0] if len(kinds) == 1 else str
    return kind


def check_settings(spec: Any) -> None:
    """Refuses the first field of a spec that lies outside of its range."""
    kind: Any = type(spec)
    for name, declared in settings_of(kind).items():
        declared.check(getattr(spec, name))


def read_setting(declared: Declared, value: Any) -> Any:
    """Returns what a person wrote as the setting's value; a mistake names the setting."""
    if declared.setting.read is None or not isinstance(value, str):
        return value
    try:
        return declared.setting.read(declared.name, value)
    except ValueError as error:
        raise SpecError(f"{declared.name} {error}") from None
