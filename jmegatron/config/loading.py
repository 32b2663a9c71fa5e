"""defaults < YAML < command line -> a checked, resolved `Config`; and back to YAML (no communication).

OmegaConf reads the YAML (duplicate keys are refused, 1e-4 is a number) and converts values to the types of the
dataclasses; nothing of it is left in the result. Tags, anchors and interpolation are refused: a config says what it
means, whatever the environment, and never more than its own length.

Reference: `megatron/training/yaml_arguments.py`, `arguments.py`.
"""

import dataclasses
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jmegatron.config.command_line import CommandLine, nearest, parse_command_line, several_values, why_unsupported
from jmegatron.config.megatron_flags import ALIASES, IGNORED, SINGLE_VALUES, VALUE_ALIASES
from jmegatron.config.options import REQUIRED, Option, flag_of, options, problem
from jmegatron.config.resolution import resolve
from jmegatron.config.sections import PLANNED, SECTIONS, Config
from jmegatron.config.validation import validate
from jmegatron.errors import ConfigError, UsageError

Values = Mapping[str, Any]

_MAX_DEPTH = 8
"""Lists and mappings inside one another; sections, options and a list of values are three."""


def parse_or_exit(argv: Sequence[str], describe_processes: Callable[[Config], str] | None = None) -> Config:
    """Returns the config of a command line, or ends the process as the command-line contract says.

    Args:
        argv: The arguments after the program's name.
        describe_processes: Returns what `--print-distributed` prints.

    Raises:
        SystemExit: 2 after one message on standard error for a wrong command line or config; 0 after `--help`,
            `--print-config` and `--print-distributed`.
    """
    try:
        line = parse_command_line(argv)
        config = _load(line)
        if line.print_distributed and describe_processes is not None:
            print(describe_processes(config), end="")
            raise SystemExit(0)
    except UsageError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if line.print_config:
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config


def load_config(argv: Sequence[str], fallbacks: Values | None = None) -> Config:
    """Returns the validated config of a command line, resolved as far as it can be without tokenizer and devices.

    Args:
        argv: The arguments after the program's name, `--config FILE` among them or not.
        fallbacks: Option name -> value that only replaces the default.

    Raises:
        ConfigError: An option is unknown, has the wrong type, or does not fit together with another one.
        SystemExit: `--help` was asked for.
    """
    line = parse_command_line(argv)
    return _load(line._replace(fallbacks={**(fallbacks or {}), **line.fallbacks}))


def _load(line: CommandLine) -> Config:
    """Merges, checks and resolves."""
    from_file = _read_file(line.config_file) if line.config_file is not None else {}
    planned = line.values.get("auto_parallel", from_file.get("auto_parallel")) is True
    build = lambda from_file: _build(  # noqa: E731
        (line.fallbacks, lambda option: option.flag),
        (from_file, lambda option: f"{line.config_file}, key {option.section}.{option.name}"),
        (_without_null(line.values), lambda option: option.flag),
    )
    config = build(from_file)
    if planned:
        # The file's layout gives way, but for the micro-batch, which has no default to go back to.
        free = {name for name in PLANNED if options()[name].default is not REQUIRED}
        config = build({name: value for name, value in from_file.items() if name not in free})
    validate(config)
    _check_no_position_embedding(config, dict(line.ignored_flags))
    fixed = tuple(name for name in PLANNED if planned and name in line.values)
    return dataclasses.replace(resolve(config), ignored_flags=line.ignored_flags, fixed_options=fixed)


def config_from_yaml(text: str, where: str = "YAML text") -> Config:
    """Returns the validated, resolved config that `to_yaml` wrote, for instance into a checkpoint.

    Args:
        text: The YAML.
        where: What to call it in messages.

    Raises:
        ConfigError: As `load_config`.
    """
    values = _checked_keys(_read_yaml(text, where), where)
    config = _build((values, lambda option: f"{where}, key {option.section}.{option.name}"))
    validate(config)
    return resolve(config)


def to_yaml(config: Config) -> str:
    """Returns the config as YAML with all options of all sections; `config_from_yaml` is its inverse."""
    sections = {
        section: {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(getattr(config, section)).items()
        }
        for section in SECTIONS
    }
    return OmegaConf.to_yaml(OmegaConf.create(sections))


# --- YAML --------------------------------------------------------------------------------------------------------


def _read_file(path: str) -> Values:
    """Returns option name -> value of a YAML file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise problem(
            "The config file cannot be read.",
            where=f"--config {path}",
            got=getattr(error, "strerror", None) or str(error),
            expected="a readable YAML file",
            fix="check the path; configs/ holds examples",
        ) from None
    return _checked_keys(_read_yaml(text, path), path)


def _read_yaml(text: str, where: str) -> Mapping[Any, Any]:
    """Returns the mapping that a YAML text holds, without looking at its keys."""
    try:
        _check_plain(text)
        loaded = OmegaConf.load(io.StringIO(text))
    except (yaml.YAMLError, OSError, OmegaConfBaseException, ValueError) as error:
        # ValueError: a lone scalar, or an interpolation that does not even parse.
        raise _bad_yaml(where, str(error)) from None
    content = OmegaConf.to_container(loaded, resolve=False)
    if not isinstance(content, dict):
        raise _bad_yaml(where, f"a {type(content).__name__}")
    return content


def _check_plain(text: str) -> None:
    """Refuses tags, anchors and deep nesting before anything is made of them.

    OmegaConf makes paths and bytes of some tags, copies what an alias stands for, and descends by recursion.
    """
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        place = f"in line {event.start_mark.line + 1}, column {event.start_mark.column + 1}"
        if getattr(event, "tag", None) is not None:
            raise yaml.YAMLError(f"the tag {event.tag} {place}")
        if getattr(event, "anchor", None) is not None:
            raise yaml.YAMLError(f"the anchor or alias {event.anchor} {place}")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise yaml.YAMLError(f"more than {_MAX_DEPTH} lists and mappings inside one another {place}")


def _bad_yaml(where: str, got: str) -> ConfigError:
    return problem(
        "The config is not plain YAML of sections.",
        where=where,
        got=" ".join(got.split()),
        expected="sections such as `model:` with `option: value` lines, each key once, no tags, no anchors, no ${...}",
        fix="correct the place that is named; configs/ holds examples",
    )


def _checked_keys(content: Mapping[Any, Any], where: str) -> Values:
    """Returns option name -> value after checking that every key stands where it belongs."""
    values: dict[str, Any] = {}
    for section, entries in content.items():
        if section not in SECTIONS:
            raise _unknown_key(str(section), None, where)
        if entries is None:
            continue
        if not isinstance(entries, dict):
            raise _bad_yaml(f"{where}, section {section}", repr(entries))
        for key, value in entries.items():
            if key not in options() or options()[key].section != section:
                raise _unknown_key(str(key), section, where)
            values[key] = value
    return values


def _unknown_key(key: str, section: str | None, where: str) -> ConfigError:
    """Returns the error for a key that is unknown or stands in the wrong section."""
    return problem(
        f"Unknown {'section' if section is None else 'key'} {key!r}.",
        where=f"{where}, " + ("top level" if section is None else f"section {section}"),
        got=key,
        expected=f"one of the sections {', '.join(SECTIONS)}" if section is None else f"an option of {section}",
        fix=_key_hint(key, section),
    )


def _key_hint(key: str, section: str | None) -> str:
    """Says what a key was probably meant to be."""
    if key in options():
        return f"{key} belongs in section {options()[key].section}"
    flag = flag_of(key)
    for alias in ALIASES:
        if flag == alias.flag:
            return f"write {alias.name}: {alias.value} in section {options()[alias.name].section}"
    for row in IGNORED:
        if flag == row.flag:
            return f"remove it, it has no effect here: {row.reason}"
    reason = why_unsupported(flag)
    if reason is not None:
        return f"remove it, it is not supported here: {reason}"
    close = nearest(key, SECTIONS if section is None else options())
    if close is None:
        return "configs/README.md lists all options"
    return (
        f"did you mean {close}?" if close in SECTIONS else f"did you mean {close} (section {options()[close].section})?"
    )


# --- types -------------------------------------------------------------------------------------------------------


def _build(*layers: tuple[Values, Callable[[Option], str]]) -> Config:
    """Returns the config that the layers give, later ones winning; each layer says where its values stand."""
    nodes = {section: OmegaConf.structured(cls) for section, cls in SECTIONS.items()}
    for node in nodes.values():
        # OmegaConf locks what stems from a frozen dataclass; the merged result is frozen again below.
        OmegaConf.set_readonly(node, False)
    for values, place in layers:
        for name, value in values.items():
            option = options()[name]
            _set(nodes[option.section], option, value, place(option))
    missing = [name for name, option in options().items() if OmegaConf.is_missing(nodes[option.section], name)]
    if missing:
        raise problem(
            "Required options are missing.",
            where=missing,
            got="no value",
            expected="a value for each of them",
            fix="give them in the YAML file or as " + " ".join(f"{flag_of(name)} VALUE" for name in missing),
        )
    built: dict[str, Any] = {section: OmegaConf.to_object(node) for section, node in nodes.items()}
    return Config(**built)


def _set(node: Any, option: Option, value: Any, where: str) -> None:
    """Assigns one value, converted to the option's type."""
    if option.is_list and isinstance(value, str):
        value = [value]
    elements = value if isinstance(value, list) else [value]
    if any(isinstance(element, str) and ("${" in element or element == "???") for element in elements):
        raise problem(
            "Interpolation is not allowed in a config.",
            where=where,
            got=repr(value),
            expected="a plain value, neither ${...} nor ???",
            fix="write the value itself",
        )
    if any(isinstance(element, str) and "\0" in element for element in elements):
        raise problem(
            "A value holds a zero byte.",
            where=where,
            got=repr(value),
            expected="text that can name a file",
            fix="write it without the zero byte",
        )
    if option.name in SINGLE_VALUES and len(elements) > 1:
        raise several_values(option, where, elements)
    if option.name == "moe_layer_freq" and isinstance(value, list) and all(type(one) is int for one in elements):
        # YAML reads the list that is a text here.
        value = f"[{','.join(map(str, elements))}]"
        elements = [value]
    # OmegaConf would turn the number 2 into true, and a bool into the string "True".
    is_bool = any(isinstance(element, bool) for element in elements)
    if is_bool != (option.kind is bool) and (is_bool or not isinstance(value, str)):
        raise _wrong_type(option, value, where)
    own = {alias.value: alias.own for alias in VALUE_ALIASES if alias.name == option.name}
    if own:
        elements = [own.get(element, element) if isinstance(element, str) else element for element in elements]
        value = elements if isinstance(value, list) else elements[0]
    try:
        OmegaConf.update(node, option.name, value, merge=False)
    except (OmegaConfBaseException, OverflowError):
        raise _wrong_type(option, value, where) from None


def _wrong_type(option: Option, value: Any, where: str) -> ConfigError:
    return problem(
        f"{option.name} has a value of the wrong type.",
        where=where,
        got=repr(value),
        expected=option.expected,
        fix=f"write {option.expected}" + (", or leave it out" if option.default_text != "required" else ""),
    )


def _without_null(values: Values) -> Values:
    """Turns the word null into no value where an option allows that."""
    return {
        name: None if options()[name].optional and value in ("null", "None") else value
        for name, value in values.items()
    }


def _check_no_position_embedding(config: Config, ignored: Mapping[str, str]) -> None:
    """The old flag means nothing beside rope, and contradicts a learned table."""
    if "--no-position-embedding" in ignored and config.model.position_embedding_type == "learned_absolute":
        raise problem(
            "--no-position-embedding contradicts the learned positions.",
            where=("position_embedding_type",),
            got="--no-position-embedding and learned_absolute",
            expected="rope or none beside --no-position-embedding",
            fix="write --position-embedding-type none (or rope) instead",
        )
