"""A short text for cache keys that describes everything in a function or an object.

    functions     code, defaults, closure, attributes, and the globals that the code names, followed into them
    objects       their class and what pickle would keep of them: `__dict__`, `__slots__`, `__getstate__`
    classes       bases, methods and attributes; of a library: name and version
    modules       a library's by name and version; the user's own by what is taken of them, or by their file
    arrays        dtype, shape and content; so are tensors
    containers    their items; a dict's order counts (a pipeline may depend on it), a set's does not

A function, class or object may say itself what it does: an attribute `__fingerprint__` of its own, a text,
stands for all of it. A class may have a method of this name, which returns what is described of an object.

The text is the same in every process and run with the same Python version: it contains no identity, file name
or line number. Files that a path names are not read, and nothing is called except an object's own
`__reduce_ex__`. `inspect.getsource` was rejected: two lambdas on one line have the same source, and a
partial has none.
"""

from __future__ import annotations

import copyreg
import dis
import enum
import functools
import importlib.util
import logging
import marshal
import sys
import types
from collections.abc import Callable, Iterator
from hashlib import blake2b
from importlib import metadata
from itertools import chain
from pathlib import Path, PurePath
from types import CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, NoReturn

import numpy as np
import torch
import xxhash

import fastload
from fastload.errors import ArgumentError
from fastload.formats.sample import bytes_of

_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_NOTHING = ("CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL")

# Attributes of a class that are derived from others, tell its position, or differ from run to run.
_DERIVED = {f"__{name}__" for name in ("dict", "weakref", "module", "doc", "qualname", "annotations")}
_DERIVED |= {f"__{name}__" for name in ("annotate", "annotate_func", "annotations_cache", "type_params")}
_DERIVED |= {f"__{name}__" for name in ("firstlineno", "static_attributes", "orig_bases", "parameters")}
_DERIVED |= {"__abstractmethods__", "_abc_impl", "__dataclass_fields__", "__dataclass_params__"}
_DERIVED |= {"__slotnames__"}  # which pickle and copy leave there
_OF_ENUMS = (FunctionType, staticmethod, classmethod, property)


def content_of(data: np.ndarray[Any, Any] | memoryview | bytes) -> bytes:
    """Return a digest of the bytes of an array, in C order; fast enough for a model's weights."""
    if isinstance(data, np.ndarray):
        flat = np.ascontiguousarray(data).reshape(-1)
        data = flat.view(np.uint8).data if data.nbytes else b""
    return xxhash.xxh3_128(data).digest()


def members_of(cls: type) -> list[tuple[str, Any]]:
    """Return the methods and attributes that a class defines, by name; of an enum its members' values too."""
    members = dict(vars(cls))
    if issubclass(cls, enum.Enum):
        members = {name: member for name, member in members.items() if isinstance(member, _OF_ENUMS)}
        members |= {name: member.value for name, member in cls.__members__.items()}
    slots = (MemberDescriptorType, GetSetDescriptorType)
    return sorted(
        (name, member)
        for name, member in members.items()
        if name not in _DERIVED and not isinstance(member, slots)
    )


def digest_of_code(code: CodeType) -> bytes:
    """Return a digest of what the code does, without its file and line numbers."""
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    table = code.co_exceptiontable
    constants = [_constant(constant) for constant in code.co_consts]
    text = repr((sys.implementation.cache_tag, code.co_code, table, counts, names, constants))
    return xxhash.xxh3_128(text.encode("utf-8", "surrogatepass")).digest()


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return digest_of_code(value).hex()
    if isinstance(value, tuple):
        return f"({','.join(map(_constant, value))})"
    if isinstance(value, frozenset):
        return f"{{{','.join(sorted(map(_constant, value)))}}}"
    if isinstance(value, int | float | complex | str | bytes | None):
        return marshal.dumps(value, 2).hex()
    return repr(value)


def _nested(code: CodeType) -> Iterator[CodeType]:
    """Return the code, and that of the functions, comprehensions and classes in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def globals_of(code: CodeType) -> list[tuple[str, ...]]:
    """Return the globals that code reads, sorted, each with the attributes taken of it: ("np", "random",
    "rand").

    `co_names` was rejected: it does not tell globals from attributes, and a lock of the name of an attribute
    would be described too.
    """
    names: set[tuple[str, ...]] = set()
    for one in _nested(code):
        chain: tuple[str, ...] = ()
        for instruction in dis.get_instructions(one):
            if instruction.opname in _GLOBALS:
                chain = (instruction.argval,)
            elif chain and instruction.opname in _ATTRIBUTES:
                names.discard(chain)
                chain = (*chain, instruction.argval)
            elif instruction.opname not in _NOTHING:
                chain = ()
            if chain:
                names.add(chain)
    return sorted(names)


def imports_of(code: CodeType, package: str) -> list[str]:
    """Return the modules that code imports when it runs, sorted.

    Args:
        package: that of the code's module, for relative imports.
    """
    names = set()
    for one in _nested(code):
        before: list[Any] = []
        for instruction in dis.get_instructions(one):
            if instruction.opname == "IMPORT_NAME":
                level, members = before[-2:]
                name = "." * level + instruction.argval if package or not level else instruction.argval
                module = importlib.util.resolve_name(name, package or None)
                names |= {module, *(f"{module}.{member}" for member in members or ())}
            before.append(instruction.argval)
    return sorted(names)


@functools.lru_cache(maxsize=4096)
def library(module: str) -> str | None:
    """Return the version of the library that a module belongs to; None for a module of the user's own."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return sys.implementation.cache_tag or ""
    if top == "fastload":  # not by metadata: on PyPI, the distribution "fastload" is another project's
        return fastload.__version__
    file = getattr(sys.modules.get(module) or sys.modules.get(top), "__file__", None)
    if file is None:
        places = [] if top in sys.modules else _roots(top)
        file = str(places[0]) if places else ""
    installed = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return _version(top) if installed else None


def _version(top: str) -> str:
    """Return the version by the metadata of the distribution: a module need not be loaded for it."""
    try:
        return metadata.version(top)
    except metadata.PackageNotFoundError:
        names = metadata.packages_distributions().get(top, [])
        return " ".join(f"{name} {metadata.version(name)}" for name in sorted(set(names)))


def _roots(top: str) -> list[Path]:
    """Return where a module that is not loaded would come from: its file, or the folders of the package."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # none, or one that was made at run time
        spec = None
    if spec is None:
        return []
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    return folders or ([Path(spec.origin)] if spec.has_location and spec.origin else [])


def files_of(module: str) -> list[Path]:
    """Return the source files of a module and of the packages around it, which need not be loaded."""
    top, *parts = module.split(".")
    files = []
    for root in _roots(top):
        here = [root / "__init__.py" if root.is_dir() else root]
        for depth in range(1, len(parts) + 1):
            step = root.joinpath(*parts[:depth])
            here += [step / "__init__.py", step.with_name(f"{step.name}.py")]
        files += [file for file in here if file.is_file()]
    return files


def found(module: str, qualname: str) -> Any:
    """Return the value of a name such as "Class.method" in a loaded module, or None."""
    value: Any = sys.modules.get(module)
    for name in qualname.split("."):
        value = getattr(value, name, None)
    return value


_VERSION = "1"  # raise it when the same thing is described in another way
_PLAIN = {type(None), bool, int, float, complex, str, bytes}

_Where = tuple[Any, str, Any]  # the place before this one, or None; how this one is written; its name


def describe(value: Any, name: str) -> str:
    """Return a text that two values share only if they hold the same.

    Args:
        value: a function or a dataset on which the samples depend.
        name: of its argument, for errors.

    Raises:
        ArgumentError: something in it cannot be described, such as an open file or a lock. The message names
            the place, such as "decode.model.lock".
    """
    description = _Description({})
    try:
        description.add(value, (None, "{}", name))
    except RecursionError:
        raise ArgumentError(f"{name} is nested too deeply to be described: {_way_out(name)}") from None
    return f"{_VERSION}-{description.digest().hex()}"


def own_text(value: Any, name: str) -> str | None:
    """Return the attribute `__fingerprint__` that a function, class or object has itself; None: it has none.

    Args:
        name: of its argument, for errors.

    Raises:
        ArgumentError: it is no text.
    """
    text = getattr(value, "__dict__", {}).get("__fingerprint__")
    if isinstance(text, str):
        return text
    if text is None or isinstance(value, type):  # a method of a class is for its objects
        return None
    raise ArgumentError(f"{name}.__fingerprint__ must be a str, found {text!r}")


class _Description:
    """A digest that values are added to, each by a unique series of bytes.

    Args:
        seen: id -> (number, object) of those that were added before; they are not described again.
    """

    def __init__(self, seen: dict[int, tuple[int, Any]]) -> None:
        self._hash = blake2b(digest_size=16)
        self._seen = seen

    def digest(self) -> bytes:
        return self._hash.digest()

    def _put(self, kind: str, content: str | bytes = b"") -> None:
        data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        self._hash.update(f"{kind} {len(data)}:".encode())
        self._hash.update(data)

    def add(self, value: Any, where: _Where) -> None:
        if _is_plain(value):
            self._put("plain", marshal.dumps(value, 2))  # version 2 does not know what is shared or interned
        elif isinstance(value, enum.Enum):
            self._put("member", str(value.name))  # a combination of flags may have none
            self.add(value.value, where)
            self.add(type(value), where)
        elif isinstance(value, PurePath | logging.Logger):
            self._put(type(value).__name__, value.name if isinstance(value, logging.Logger) else str(value))
        elif isinstance(value, np.generic) or type(value) in (np.ndarray, np.memmap):
            self._add_array(np.asarray(value), where)
        elif id(value) in self._seen:
            self._put("seen", str(self._seen[id(value)][0]))
        else:
            self._seen[id(value)] = len(self._seen), value  # held, so that no other object has its id
            self._put(type(value).__name__)
            text = own_text(value, where[2])
            if text is None:
                _adder(value)(self, value, where)
            else:
                self._put("fingerprint", text)

    def _add_members(self, value: Any, where: _Where, *names: str) -> None:
        for name in names:
            self.add(getattr(value, name), (where, ".{}", name))

    # -- functions

    def _add_function(self, value: types.FunctionType, where: _Where) -> None:
        home = value.__globals__.get("__name__", "")
        if library(home) is not None:
            self._add_library(home, value.__qualname__)
            if found(home, value.__qualname__) is value:
                return
        self._put("code", digest_of_code(value.__code__))
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            self.add(cell, (where, ".__closure__[{!r}]", name))
        self._add_members(value, where, "__defaults__", "__kwdefaults__", "__dict__")
        if library(home) is None:
            self._add_globals(value, where)

    def _add_globals(self, value: types.FunctionType, where: _Where) -> None:
        """Add what the code names outside of itself, as far as it is not Python's own."""
        for names in globals_of(value.__code__):
            if names[0] not in value.__globals__:
                continue
            used, place = value.__globals__[names[0]], (where, ".__globals__[{!r}]", names[0])
            for name in names[1:]:
                own = isinstance(used, types.ModuleType) and library(used.__name__) is None
                if not own or not hasattr(used, name):
                    break
                used, place = getattr(used, name), (place, ".{}", name)
            self._put("global", ".".join(names))
            self.add(used, place)
        for module in imports_of(value.__code__, value.__globals__.get("__package__") or ""):
            self._put("import", module)
            self._add_unloaded(module)

    def _add_unloaded(self, module: str) -> None:
        """Add a module that code imports when it runs. It may not be loaded: that may be slow."""
        if library(module) is not None:
            return self._add_library(module, "")
        for file in files_of(module):
            self._put("file", content_of(file.read_bytes()))

    def _add_cell(self, value: types.CellType, where: _Where) -> None:
        try:
            content = value.cell_contents
        except ValueError:  # a name that is not bound yet
            return
        self.add(content, where)

    # -- modules and classes

    def _add_library(self, module: str, name: str) -> None:
        self._put("library", f"{module} {name} {library(module)}")

    def _add_module(self, value: types.ModuleType, where: _Where) -> None:
        if library(value.__name__) is not None:
            return self._add_library(value.__name__, "")
        file = getattr(value, "__file__", None)
        if file is None:
            self._refuse(value, where)
        self._put("file", content_of(Path(file).read_bytes()))

    def _add_class(self, value: type, where: _Where) -> None:
        home: object = value.__module__  # of some types of C it is what their instances' is made by
        home = home if isinstance(home, str) else "builtins"
        if library(home) is not None:
            return self._add_library(home, value.__qualname__)
        self._put("class", value.__qualname__)
        self._add_members(value, where, "__class__", "__bases__")
        for name, member in members_of(value):
            self._put("attribute", name)
            self.add(member, (where, ".{}", name))

    # -- values

    def _add_array(self, value: np.ndarray[Any, Any], where: _Where) -> None:
        self._put("array", repr((value.dtype, value.shape)))
        if value.dtype.hasobject:
            self.add(value.tolist(), where)
        else:
            self._put("content", content_of(value))

    def _add_tensor(self, value: torch.Tensor, where: _Where) -> None:
        self._put("tensor", repr((str(value.dtype), str(value.layout), value.requires_grad)))
        try:
            data = bytes_of(value.detach().as_subclass(torch.Tensor).cpu())
            self._put("content", repr(tuple(value.shape)).encode() + content_of(data))
        except (RuntimeError, TypeError, NotImplementedError):  # sparse, quantised, without storage
            self._refuse(value, where)
        self._add_members(value, where, "__dict__", "__class__")

    def _add_sequence(self, value: list[Any] | tuple[Any, ...], where: _Where) -> None:
        self._put("items", str(len(value)))
        for position, item in enumerate(value):
            self.add(item, (where, "[{}]", position))

    def _add_dict(self, value: Any, where: _Where) -> None:
        self._put("items", str(len(value)))
        for key, item in value.items():
            self.add(key, (where, " key {!r}", key))
            self.add(item, (where, "[{!r}]", key))

    def _add_set(self, value: Any, where: _Where) -> None:
        digests = []
        for item in value:
            one = _Description({} if _is_plain(item) else dict(self._seen))
            one.add(item, (where, " item {!r}", item))
            digests.append(one.digest())
        self._put("items", b"".join(sorted(digests)))
        self._add_members(value, where, "__class__")

    def _add_object(self, value: Any, where: _Where) -> None:
        """Add an object as pickle would keep it, which knows the state of those that have no `__dict__`."""
        self.add(type(value), (where, ".{}", "__class__"))
        content = getattr(type(value), "__fingerprint__", None)
        if callable(content):  # what samples depend on, without what changes as they are read
            return self.add(content(value), where)
        try:
            registered = copyreg.dispatch_table.get(type(value))
            reduced: Any = value.__reduce_ex__(4) if registered is None else registered(value)
        except Exception:  # whatever a class says instead
            self._refuse(value, where)
        if isinstance(reduced, str):  # a function of C, a constant: what its module has under that name
            return self._add_named(getattr(value, "__module__", None) or type(value).__module__, reduced)
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        self.add(make, (where, ".{}", "__reduce__"))
        self.add(arguments, (where, ".{}", "__reduce__"))
        for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
            if isinstance(part, dict) and all(isinstance(name, str) for name in part):
                self._put("state", str(len(part)))
                for name, item in sorted(part.items()):
                    self._put("attribute", name)
                    self.add(item, (where, ".{}", name))
            else:
                self.add(part, (where, ".{}", "__getstate__()"))
        self.add(None if items is None else list(items), where)
        self.add(None if pairs is None else dict(pairs), where)

    def _add_named(self, module: str, name: str) -> None:
        self._put("name", name)
        self._add_unloaded(module)

    def _refuse(self, value: Any, where: _Where) -> NoReturn:
        parts: list[str] = []
        here: _Where | None = where
        while here is not None:
            here, form, name = here
            parts.append(form.format(name))
        raise ArgumentError(
            f"{''.join(reversed(parts))} is a {type(value).__module__}.{type(value).__qualname__}, which "
            f"fastload cannot describe: {_way_out(parts[-1])}"
        )


def _way_out(name: str) -> str:
    return f"set {name}.__fingerprint__ to a text that you change whenever {name} makes other samples"


def _is_plain(value: Any) -> bool:
    """Return whether it is of Python's plain values throughout, as far as that is cheap to find out."""
    kind = type(value)
    if kind is dict:
        return set(map(type, chain(value, value.values()))) <= _PLAIN
    if kind is not list and kind is not tuple:
        return kind in _PLAIN
    inner = set(map(type, value))
    if inner and inner <= {list, tuple}:
        inner = set(map(type, chain.from_iterable(value)))
    return inner <= _PLAIN


_PARTIAL = ("func", "args", "keywords", "__dict__", "__class__")
_Add = Callable[[_Description, Any, _Where], None]
# The kinds that are described in a way of their own, and those of which this is true for subclasses too.
_EXACT: dict[type, _Add] = {
    types.FunctionType: _Description._add_function,
    types.CellType: _Description._add_cell,
    list: _Description._add_sequence,
    tuple: _Description._add_sequence,
    dict: _Description._add_dict,
    types.MappingProxyType: _Description._add_dict,
    types.MethodType: lambda to, value, where: to._add_members(value, where, "__func__", "__self__"),
    staticmethod: lambda to, value, where: to._add_members(value, where, "__func__"),
    classmethod: lambda to, value, where: to._add_members(value, where, "__func__"),
    property: lambda to, value, where: to._add_members(value, where, "fget", "fset", "fdel"),
    functools.cached_property: lambda to, value, where: to._add_members(value, where, "func"),
    functools._lru_cache_wrapper: lambda to, value, where: to._add_members(value, where, "__wrapped__"),
}
_KINDS: dict[type, _Add] = {
    functools.partial: lambda to, value, where: to._add_members(value, where, *_PARTIAL),
    types.ModuleType: _Description._add_module,
    type: _Description._add_class,
    set: _Description._add_set,
    frozenset: _Description._add_set,
    torch.Tensor: _Description._add_tensor,
}


def _adder(value: Any) -> _Add:
    exact = _EXACT.get(type(value))
    if exact is not None:
        return exact
    kinds = (add for kind, add in _KINDS.items() if isinstance(value, kind))
    return next(kinds, _Description._add_object)
