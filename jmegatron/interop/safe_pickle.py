"""Reads pickles of other frameworks as data: a machine of its own for the opcodes that hold data. No communication.

Python's unpickler calls whatever a file names. Here nothing is imported and nothing is called but the constructors that
the caller lists; any other class or function becomes an inert `Foreign` that keeps its name and arguments, or is
refused. Python's pickle module is not used at all, only `pickletools`, which splits a file into opcodes.
"""

import dataclasses
import pickletools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from jmegatron.errors import DataFileError

Known = Mapping[tuple[str, str], Callable[..., Any]]
"""Constructor of each (module, name) that may be made."""

MOST_OPCODES = 1 << 26
"""An object of Python costs about 100 bytes and at least one opcode."""


@dataclasses.dataclass(eq=False)
class Foreign:
    """Stands for a class, a function or an object of it, which is neither imported nor made."""

    name: str
    """module.name as the pickle has it."""
    args: tuple[Any, ...] | None = None
    """What it was called with; None: the class or function itself."""
    state: Any = None
    """What would have been set on the object: mostly a dict of its fields."""
    items: list[Any] = dataclasses.field(default_factory=list, repr=False)
    """What would have been added: elements of a list, (key, value) of a dict."""

    def __repr__(self) -> str:
        return self.name if self.args is None else f"{self.name}(...)"


@dataclasses.dataclass(eq=False)
class _Name:
    """A known class or function on the stack."""

    name: str
    make: Callable[..., Any]


class Refused(Exception):
    """What is wrong with a pickle; a constructor may raise it, too."""


_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
_VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "INT", "LONG", "FLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "BINSTRING", "SHORT_BINSTRING"),
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUT = {"PUT", "BINPUT", "LONG_BINPUT"}
_GET = {"GET", "BINGET", "LONG_BINGET"}
_PLAIN = (str, int, float, bytes, type(None))


def loads(
    data: bytes,
    known: Known,
    *,
    where: str,
    strict: bool = False,
    persistent: Callable[[Any], Any] | None = None,
    most_opcodes: int = MOST_OPCODES,
) -> Any:
    """Returns what a pickle holds: plain values, what `known` makes, and `Foreign` for all else.

    Args:
      data: the pickle, of any protocol.
      known: the constructors that may be called. What they return is plain data, or a `Foreign`.
      where: the file, for messages.
      strict: refuse other names instead of keeping them as `Foreign`.
      persistent: makes an object of a persistent id; None: refuse them.
      most_opcodes: limit, and with it that of memory.

    Raises:
      DataFileError: the pickle is damaged, too large, or asks for what is not allowed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # pickletools passes escapes that Python warns of
            return _Machine(known, strict, persistent, most_opcodes).run(data)
    except Refused as error:
        what = str(error)
    except (
        ValueError,
        TypeError,
        IndexError,
        KeyError,
        AttributeError,
        RecursionError,
        OverflowError,
        Warning,
    ) as error:
        what = f"it is damaged ({type(error).__name__}: {str(error)[:200]})"
    except MemoryError:
        what = "it asks for more memory than there is"
    raise DataFileError(
        f"{where}: the pickle in it is not read: {what}; expected plain values and tensors, nothing of it is run; fix:"
        " give a checkpoint that Megatron-Core or torch wrote"
    )


class _Machine:
    """The stack, the marks and the memory of one pickle."""

    def __init__(self, known: Known, strict: bool, persistent: Callable[[Any], Any] | None, most_opcodes: int):
        self._known, self._strict, self._persistent = known, strict, persistent
        self._left = most_opcodes
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(data):
            self._left -= 1
            if self._left < 0:
                raise Refused("it has too many opcodes")
            name = opcode.name
            if name == "STOP":
                if self._marks or len(self._stack) != 1:
                    raise Refused("it is damaged: values are left over")
                return self._value(self._stack.pop())
            self._step(name, argument)
        raise Refused("it is damaged: it has no end")

    def _step(self, name: str, argument: Any) -> None:
        if name in _VALUES:
            self._push(argument)
        elif name in _CONSTANTS:
            self._push(_CONSTANTS[name])
        elif name in _EMPTY:
            self._push(_EMPTY[name]())
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._stack[-1]
        elif name in _PUT:
            self._memo[int(argument)] = self._stack[-1]
        elif name in _GET:
            self._push(self._memo[int(argument)])
        elif name == "MARK":
            self._marks.append(self._stack)
            self._stack = []
        elif name in _TUPLES:
            self._push(tuple(map(self._value, self._pop_last(_TUPLES[name]))))
        elif name not in ("PROTO", "FRAME"):
            method = getattr(self, f"_do_{name.lower()}", None)
            if method is None:
                raise Refused(f"the opcode {name} is not allowed")
            method(argument)

    # ---- the stack ------------------------------------------------------------------------------------------------
    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop_last(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise Refused("it is damaged: a value is missing")
        values = self._stack[-count:]
        del self._stack[-count:]
        return values

    def _pop_to_mark(self) -> list[Any]:
        if not self._marks:
            raise Refused("it is damaged: a mark is missing")
        values, self._stack = self._stack, self._marks.pop()
        return values

    @staticmethod
    def _value(value: Any) -> Any:
        return Foreign(value.name) if isinstance(value, _Name) else value

    @staticmethod
    def _key(key: Any) -> Any:
        """Returns a key that takes no time to hash: tuples of tuples of one tuple would take for ever."""
        flat = key if type(key) is tuple else (key,)
        if not all(isinstance(part, (*_PLAIN, Foreign)) for part in flat):
            raise Refused(f"a key is a {type(key).__name__} that holds more than plain values")
        return key

    # ---- names and objects ----------------------------------------------------------------------------------------
    def _name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise Refused("it is damaged: a name is no text")
        make = self._known.get((module, name))
        full = f"{module}.{name}"[:200]
        if make is None and self._strict:
            raise Refused(f"it names {full}, which is not allowed here")
        self._push(Foreign(full) if make is None else _Name(full, make))

    def _do_global(self, argument: str) -> None:
        self._name(*argument.split(" ", 1))  # as pickletools joins the two lines

    def _do_stack_global(self, _: None) -> None:
        self._name(*self._pop_last(2))

    def _make(self, what: Any, args: Any, keywords: Any = None) -> None:
        if type(args) is not tuple or (keywords and type(keywords) is not dict):
            raise Refused("it is damaged: arguments are no tuple")
        if isinstance(what, _Name):
            if keywords:
                raise Refused(f"it calls {what.name} with keywords")
            self._push(what.make(*args))
        elif isinstance(what, Foreign) and what.args is None:
            self._push(Foreign(what.name, (*args, keywords) if keywords else args))
        else:
            raise Refused(f"it calls a {type(what).__name__}")

    def _do_reduce(self, _: None) -> None:
        self._make(*self._pop_last(2))

    _do_newobj = _do_reduce

    def _do_newobj_ex(self, _: None) -> None:
        self._make(*self._pop_last(3))

    def _do_build(self, _: None) -> None:
        (state,) = self._pop_last(1)
        target = self._stack[-1]
        if type(target) is dict and type(state) is dict and not state:
            return  # an OrderedDict without fields of its own
        if not isinstance(target, Foreign) or target.args is None:
            raise Refused(f"it sets fields of {self._value(target)!r:.100}")
        target.state = self._value(state)

    def _do_binpersid(self, _: None) -> None:
        (name,) = self._pop_last(1)
        if self._persistent is None:
            raise Refused("it has persistent ids, which have no meaning here")
        self._push(self._persistent(name))

    # ---- containers -----------------------------------------------------------------------------------------------
    def _do_tuple(self, _: None) -> None:
        self._push(tuple(map(self._value, self._pop_to_mark())))

    def _do_list(self, _: None) -> None:
        self._push(list(map(self._value, self._pop_to_mark())))

    def _do_dict(self, _: None) -> None:
        values = self._pop_to_mark()
        self._push({})
        self._set_items(values)

    def _do_frozenset(self, _: None) -> None:
        self._push(frozenset(map(self._key, map(self._value, self._pop_to_mark()))))

    def _do_append(self, _: None) -> None:
        self._extend(self._pop_last(1))

    def _do_appends(self, _: None) -> None:
        self._extend(self._pop_to_mark())

    def _extend(self, values: list[Any]) -> None:
        target, values = self._stack[-1], [self._value(value) for value in values]
        if type(target) is list:
            target.extend(values)
        elif isinstance(target, Foreign) and target.args is not None:
            target.items.extend(values)
        else:
            raise Refused(f"it appends to a {type(target).__name__}")

    def _do_additems(self, _: None) -> None:
        values = [self._key(self._value(value)) for value in self._pop_to_mark()]
        target = self._stack[-1]
        if type(target) is not set:
            raise Refused(f"it adds to a {type(target).__name__}")
        target.update(values)

    def _do_setitem(self, _: None) -> None:
        self._set_items(self._pop_last(2))

    def _do_setitems(self, _: None) -> None:
        self._set_items(self._pop_to_mark())

    def _set_items(self, values: list[Any]) -> None:
        target, values = self._stack[-1], [self._value(value) for value in values]
        pairs = list(zip(map(self._key, values[::2]), values[1::2], strict=True))
        if type(target) is dict:
            target.update(pairs)
        elif isinstance(target, Foreign) and target.args is not None:
            target.items.extend(pairs)
        else:
            raise Refused(f"it sets items of a {type(target).__name__}")

    def _do_dup(self, _: None) -> None:
        self._push(self._stack[-1])

    def _do_pop(self, _: None) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_to_mark()

    def _do_pop_mark(self, _: None) -> None:
        self._pop_to_mark()
