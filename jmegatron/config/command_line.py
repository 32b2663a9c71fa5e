"""Command line -> option values as text; types are checked by `loading` (no communication).

Every option of `sections` is a flag. Before argparse runs, the line is screened from left to right, so that the first
flag that has no meaning here is the one that is named.

Reference: `megatron/training/arguments.py`.
"""

import argparse
import difflib
import itertools
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from jmegatron.config.megatron_flags import (
    ALIASES,
    IGNORED,
    MANY,
    SINGLE_VALUES,
    UNSUPPORTED,
    UNSUPPORTED_FAMILIES,
    Alias,
    OtherFlag,
)
from jmegatron.config.options import Option, options, problem
from jmegatron.config.sections import SECTIONS
from jmegatron.errors import ConfigError


class CommandLine(NamedTuple):
    """What the command line says.

    Attributes:
        values: Option name -> text, list of texts, or bool.
        fallbacks: Option name -> value that only replaces the default.
        config_file: Path of the YAML file.
        print_config: Whether to print the resolved config and stop.
        print_distributed: Whether to print which processes the job has and stop.
        ignored_flags: (flag, reason) of Megatron flags without effect.
    """

    values: dict[str, Any]
    fallbacks: dict[str, Any]
    config_file: str | None
    print_config: bool
    print_distributed: bool
    ignored_flags: tuple[tuple[str, str], ...]


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Returns the values that the command line gives, in the words of the user.

    Raises:
        ConfigError: A flag is unknown, not supported, lacks its value, or contradicts another one.
        SystemExit: `--help` was asked for and has been printed.
    """
    tokens, aliases, ignored = _screen(argv)
    space, stray = _parser().parse_known_args(tokens)
    if stray:
        raise _stray_value(stray[0], tokens)
    if len(space.config) > 1:
        raise problem(
            "--config is given more than once.",
            where="--config",
            got=" ".join(space.config),
            expected="one YAML file",
            fix="keep one file and give what differs as options",
        )
    values = {name: value for name, value in vars(space).items() if name in options()}
    strong = [alias for alias in aliases if not alias.weak]
    for alias in strong:
        _apply_alias(alias, values, strong)
    fallbacks = {alias.name: alias.value for alias in aliases if alias.weak}
    config_file = space.config[0] if space.config else None
    return CommandLine(values, fallbacks, config_file, space.print_config, space.print_distributed, ignored)


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """Returns the known name that resembles `word` most, `None` when none comes close."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)
    return matches[0] if matches else None


def why_unsupported(flag: str) -> str | None:
    """Returns why a known Megatron flag is refused, `None` for a flag that is not known."""
    rows = {row.flag: row.reason for row in UNSUPPORTED}
    if flag in rows:
        return rows[flag]
    families = [reason for beginning, reason in UNSUPPORTED_FAMILIES if flag.startswith(beginning)]
    # Some families have options beside them: a letter too many in one of these is a slip, not another flag.
    if not families or nearest(flag, [*_known_flags(), *(row.flag for row in IGNORED)], _SLIP):
        return None
    return families[0]


_SLIP = 0.95
"""Likeness from which on an unknown flag is a misspelled one: a letter or two in twenty."""


def several_values(option: Option, where: str, values: Sequence[Any]) -> ConfigError:
    """Returns the error for an option of `SINGLE_VALUES` with more than one value."""
    return problem(
        f"{option.name} has several values: {SINGLE_VALUES[option.name]}.",
        where=where,
        got=" ".join(map(str, values)),
        expected=f"{option.expected}, alone",
        fix="keep one balancing type and its --moe-aux-loss-coeff",
    )


# --- screening ---------------------------------------------------------------------------------------------------


def _screen(argv: Sequence[str]) -> tuple[list[str], list[Alias], tuple[tuple[str, str], ...]]:
    """Takes aliases and flags without effect out of the line; stops at the first flag that means nothing here."""
    known = _known_flags()
    alias_of = {alias.flag: alias for alias in ALIASES}
    ignored_of = {row.flag: row for row in IGNORED}
    kept: list[str] = []
    aliases: list[Alias] = []
    ignored: dict[str, str] = {}
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        flag, has_value, _ = token.partition("=")
        if flag in alias_of:
            _refuse_value(flag, token, has_value)
            aliases.append(alias_of[flag])
        elif flag in ignored_of:
            _drop_values(ignored_of[flag], token, rest)
            ignored[flag] = ignored_of[flag].reason
        elif flag in known:
            option = known[flag]
            kept.append(_with_value(option, flag, token, rest))
            if option is not None and option.name in SINGLE_VALUES:
                _refuse_several(option, token, rest)
        elif token.startswith("-") and token != "-h" and not _is_number(token):
            raise _unknown_flag(flag, rest)
        else:
            kept.append(token)
    return kept, aliases, tuple(ignored.items())


def _known_flags() -> dict[str, Option | None]:
    """Returns flag -> option for everything that argparse will accept; `None` for flags that are no options."""
    flags: dict[str, Option | None] = dict.fromkeys(("--help", "--print-config", "--print-distributed", "--config"))
    for option in options().values():
        flags[option.flag] = option
        if option.negation:
            flags[option.negation] = option
    return flags


def _with_value(option: Option | None, flag: str, token: str, rest: list[str]) -> str:
    """Returns the token, joined with a value that argparse would take for a flag, such as -1e-5."""
    takes_value = flag == "--config" if option is None else option.kind is not bool
    if not takes_value:
        _refuse_value(flag, token, "=" in token)
        return token
    if "=" in token:
        return token
    if not rest or (rest[0].startswith("-") and not _is_number(rest[0])):
        raise problem(
            f"{flag} needs a value.",
            where=flag,
            got=f"{rest[0]!r} right after it" if rest else "nothing after it",
            expected=option.expected if option else "the path of a YAML file",
            fix=f"write {flag} VALUE, or {flag}=VALUE for a value that starts with a dash",
        )
    return f"{token}={rest.pop(0)}" if rest[0].startswith("-") else token


def _refuse_value(flag: str, token: str, has_value: object) -> None:
    """Stops at --switch=value."""
    if has_value:
        raise _switch_with_value(flag, token.partition("=")[2])


def _switch_with_value(flag: str, value: str) -> ConfigError:
    """Returns the error for a value given to a flag that takes none."""
    option = _known_flags().get(flag)
    fix = f"write {flag} alone"
    if option is not None:
        fix = f"write {option.flag} for true, {option.negation} for false"
    return problem(f"{flag} takes no value.", where=flag, got=repr(value), expected="nothing after it", fix=fix)


def _refuse_several(option: Option, token: str, rest: Sequence[str]) -> None:
    """Stops where more than one value follows an option that takes several in the reference."""
    values = [token.partition("=")[2]] if "=" in token else []
    values += itertools.takewhile(lambda word: not word.startswith("--"), rest)
    if len(values) > 1:
        raise several_values(option, option.flag, values)


def _drop_values(row: OtherFlag, token: str, rest: list[str]) -> None:
    """Removes the values of a flag without effect, and stops at one that is not known to have none."""
    values = [token.partition("=")[2]] if "=" in token else []
    while (row.values == MANY or len(values) < row.values) and rest and not rest[0].startswith("--"):
        values.append(rest.pop(0))
    for value in values:
        if row.choices and value not in row.choices:
            raise problem(
                f"{row.flag} has a value that is not known.",
                where=row.flag,
                got=repr(value),
                expected=f"one of {', '.join(row.choices)}, none of which has an effect: {row.reason}",
                fix=f"remove {row.flag}, or correct its value",
            )


def _is_number(text: str) -> bool:
    """Returns whether it is a number, or several between commas, as of --window-size -1,0."""
    try:
        for part in text.split(","):
            float(part)
    except ValueError:
        return False
    return True


def _unknown_flag(flag: str, rest: Sequence[str] = ()) -> ConfigError:
    """Returns the error for a flag that is refused or unknown; `rest` is what follows it on the line."""
    reason = why_unsupported(flag)
    if reason is not None:
        # All of them: a pasted line should not have to be tried once per flag.
        others = [token for token in (part.partition("=")[0] for part in rest) if why_unsupported(token)]
        more = f"; further on the line also: {', '.join(dict.fromkeys(others))}" if others else ""
        return problem(
            f"{flag} is a Megatron-LM flag that is not supported here.",
            where=flag,
            got=flag,
            expected=f"a supported option: {reason}",
            fix=f"remove {flag}; configs/README.md lists what is supported{more}",
        )
    names = [*_known_flags(), *(alias.flag for alias in ALIASES), *(row.flag for row in (*IGNORED, *UNSUPPORTED))]
    close = nearest(flag, names)
    return problem(
        f"Unknown option {flag}.",
        where="command line",
        got=flag,
        expected="an option that --help lists",
        fix=f"did you mean {close}?" if close else "run with --help for the list of options",
    )


def _stray_value(value: str, tokens: list[str]) -> ConfigError:
    """Returns the error for an argument that belongs to no option."""
    before = tokens[tokens.index(value) - 1] if value in tokens[1:] else ""
    option = _known_flags().get(before)
    if option is not None and option.kind is bool:
        return _switch_with_value(before, value)
    return problem(
        f"The argument {value!r} belongs to no option.",
        where="command line" + (f", after {before}" if before else ""),
        got=repr(value),
        expected="--option value pairs",
        fix="put --config in front of a YAML file, quote values that contain spaces",
    )


def _apply_alias(alias: Alias, values: dict[str, Any], aliases: list[Alias]) -> None:
    """Writes an alias's value, unless it contradicts what the line says elsewhere."""
    given = values.get(alias.name, alias.value)
    if given != alias.value:
        flags = [other.flag for other in aliases if other.name == alias.name]
        raise problem(
            f"{alias.flag} contradicts another option.",
            where=(alias.name,),
            got=f"{' '.join(flags)} and {options()[alias.name].flag} {given}",
            expected=f"one value; {alias.flag} means {options()[alias.name].flag} {alias.value}",
            fix="keep one of them",
        )
    values[alias.name] = alias.value


# --- argparse ----------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise problem(
            "The command line cannot be read.",
            where="command line",
            got=message,
            expected="--option value pairs",
            fix="run with --help for the list of options",
        )


def _parser() -> _Parser:
    """Returns the parser: one group per section, no defaults, so that only what was given comes back."""
    parser = _Parser(
        prog="train.py",
        usage="%(prog)s [--config FILE] [--option value ...]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Trains a model. Precedence: defaults, then the YAML file, then the command line.",
        epilog=(
            "`--option null` takes a value of the YAML file back.\n"
            "A Megatron-LM launch line can be pasted; configs/README.md lists the flags without effect."
        ),
    )
    general = parser.add_argument_group("general")
    general.add_argument(
        "--config", metavar="FILE", action="append", default=[], help="YAML file with the sections below"
    )
    general.add_argument(
        "--print-config", action="store_true", default=False, help="print the resolved config as YAML and exit"
    )
    general.add_argument(
        "--print-distributed",
        action="store_true",
        default=False,
        help="print which processes the job has, which of them this is, and where that is known from, and exit",
    )
    for section, cls in SECTIONS.items():
        group = parser.add_argument_group(section, textwrap.shorten(cls.__doc__ or "", 100))
        for option in options().values():
            if option.section == section:
                _add_option(group, option)
    return parser


def _add_option(group: Any, option: Option) -> None:
    """Adds one option to its group of the help."""
    default = option.default_text
    text = f"{option.help} ({default if default == 'required' else 'default: ' + default})".replace("%", "%%")
    if option.kind is bool:
        group.add_argument(option.flag, dest=option.name, action="store_true", help=text)
        group.add_argument(option.negation, dest=option.name, action="store_false", help=f"Undo {option.flag}.")
        return
    group.add_argument(
        option.flag,
        dest=option.name,
        nargs="+" if option.is_list else None,
        metavar="{" + ",".join(option.choices) + "}" if option.choices else option.kind.__name__.upper(),
        help=text,
    )
