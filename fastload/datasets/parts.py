"""The parts of functions, classes and modules, in a form that does not change from run to run."""

from __future__ import annotations

import dis
import enum
import functools
import importlib.util
import marshal
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

import numpy as np
import xxhash

import fastload

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
    """A digest of the bytes of an array, in C order; fast enough for a model's weights."""
    if isinstance(data, np.ndarray):
        flat = np.ascontiguousarray(data).reshape(-1)
        data = flat.view(np.uint8).data if data.nbytes else b""
    return xxhash.xxh3_128(data).digest()


def members_of(cls: type) -> list[tuple[str, Any]]:
    """The methods and attributes that a class defines, by name; of an enum also the members' values."""
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
    """A digest of what the code does, without its file and line numbers."""
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
    """The code, and that of the functions, comprehensions and classes in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def globals_of(code: CodeType) -> list[tuple[str, ...]]:
    """The globals that code reads, sorted, each with the attributes taken of it: ("np", "random", "rand").

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
    """The modules that code imports when it runs, sorted.

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
    """The version of the library that a module belongs to; None for a module of the user's own."""
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
    """By the metadata of the distribution: a module need not be loaded for it."""
    try:
        return metadata.version(top)
    except metadata.PackageNotFoundError:
        names = metadata.packages_distributions().get(top, [])
        return " ".join(f"{name} {metadata.version(name)}" for name in sorted(set(names)))


def _roots(top: str) -> list[Path]:
    """Where a module that is not loaded would come from: its file, or the folders of the package."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # none, or one that was made at run time
        spec = None
    if spec is None:
        return []
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    return folders or ([Path(spec.origin)] if spec.has_location and spec.origin else [])


def files_of(module: str) -> list[Path]:
    """The source files of a module and of the packages around it, which need not be loaded."""
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
    """The value of a name such as "Class.method" in a loaded module, or None."""
    value: Any = sys.modules.get(module)
    for name in qualname.split("."):
        value = getattr(value, name, None)
    return value
