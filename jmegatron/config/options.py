"""One record per option, read off the dataclasses, and the form of every message about options (no communication).

The docstrings under the fields are not kept by Python, so the module's source is parsed once.

Reference: the argument groups of `megatron/training/arguments.py`.
"""

import ast
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Iterable

from jmegatron.config import sections
from jmegatron.errors import ConfigError

REQUIRED = dataclasses.MISSING


@dataclasses.dataclass(frozen=True)
class Option:
    """What is known about one option.

    Attributes:
        section: Section that holds it.
        name: Its key in a YAML file.
        kind: `bool`, `int`, `float` or `str`; the kind of one element for a list.
        choices: The allowed values, empty when any value of the kind will do.
        is_list: Whether it takes several values.
        optional: Whether `null` is a value.
        default: The default, or `REQUIRED`.
        help: The field's docstring.
    """

    section: str
    name: str
    kind: type
    choices: tuple[str, ...]
    is_list: bool
    optional: bool
    default: typing.Any
    help: str

    @property
    def flag(self) -> str:
        """The option's name on the command line."""
        return flag_of(self.name)

    @property
    def negation(self) -> str | None:
        """The flag that sets a bool option to false, `None` for other kinds."""
        if self.kind is not bool:
            return None
        # --no-compilation-cache reads better undone by --compilation-cache than by --no-no-compilation-cache.
        return "--" + self.flag.removeprefix("--no-") if self.name.startswith("no_") else "--no-" + self.flag[2:]

    @property
    def expected(self) -> str:
        """What a value has to be, for messages and tables."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        name = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[self.kind]
        return "a list of strings" if self.is_list else name

    @property
    def default_text(self) -> str:
        """The default for people: `required`, `derived` or `not set`, or the value as YAML has it."""
        if self.default is REQUIRED:
            return "required"
        if self.default is None:
            return "derived" if "Derived" in self.help else "not set"
        if self.is_list:
            return " ".join(self.default) or "none"
        return str(self.default).lower() if self.kind is bool else str(self.default)


def flag_of(name: str) -> str:
    """Returns the command-line spelling of an option's name."""
    return "--" + name.replace("_", "-")


@functools.cache
def options() -> dict[str, Option]:
    """Returns every option by name, in the order of the sections."""
    docs = _field_docs()
    return {
        field.name: _option(section, field, hints[field.name], docs[cls.__name__][field.name])
        for section, cls in sections.SECTIONS.items()
        for hints in [typing.get_type_hints(cls)]
        for field in dataclasses.fields(cls)
    }


def _option(section: str, field: dataclasses.Field, hint: typing.Any, doc: str) -> Option:
    """Builds the record of one field from its annotation and docstring."""
    optional = type(None) in typing.get_args(hint)
    if optional:
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        hint = inner[0]
    origin = typing.get_origin(hint)
    choices = typing.get_args(hint) if origin is typing.Literal else ()
    kind = str if origin in (typing.Literal, tuple) else hint
    assert not isinstance(kind, types.UnionType), field.name
    return Option(section, field.name, kind, choices, origin is tuple, optional, field.default, doc)


def _field_docs() -> dict[str, dict[str, str]]:
    """Returns class name -> field name -> docstring, from the source of the sections."""
    tree = ast.parse(inspect.getsource(sections))
    return {node.name: _class_docs(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _class_docs(node: ast.ClassDef) -> dict[str, str]:
    """Returns field name -> the string literal that follows it."""
    return {
        field.target.id: inspect.cleandoc(doc.value.value)
        for field, doc in zip(node.body, node.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)
    }


def problem(what: str, *, where: str | Iterable[str], got: str, expected: str, fix: str) -> ConfigError:
    """Returns a `ConfigError` whose message has the five parts that every message about options has.

    Args:
        what: One sentence that says what is wrong.
        where: A place in words, or the names of the options concerned.
        got: The values that were found.
        expected: The rule that they break.
        fix: What to write instead.
    """
    if not isinstance(where, str):
        where = ", ".join(f"{flag_of(name)} ({options()[name].section}.{name})" for name in where)
    return ConfigError(f"{what}\n  where: {where}\n  got: {got}\n  expected: {expected}\n  fix: {fix}")
