"""Whose a symbol is, and how a person reads it."""

from __future__ import annotations

import re
from collections.abc import Container
from functools import lru_cache
from typing import Any

import itanium_demangler

# A length-prefixed component of a mangled name: the namespaces c10, at, torch, caffe2 and c10d.
_TORCH_NAMESPACE = re.compile(r"(?<!\d)(?:3c10|2at|5torch|6caffe2|4c10d)")
_STABLE_NAME = re.compile(r"(?:aoti_)?torch_[a-z]")
_PYTHON_C_NAME = re.compile(r"THP[A-Z]")
# std, its abbreviations, and the compiler's support namespaces; operators new and delete.
_RUNTIME_NAME = re.compile(
    r"_Z(?:T[VTIS]|GV|TC)?(?:N[rVK]*[RO]?)?(?:S[tabsiod]|9__gnu_cxx|10__cxxabiv1|11__gnu_debug)|_Z(?:n[wa]|d[la])"
)
_PYTHON_NAME = re.compile(r"_?Py[A-Z_]")
_TORCH_LIBRARY = re.compile(r"lib(?:torch|c10|shm|caffe2)\w*\.so")
_BUNDLED_TAG = re.compile(r"[.-][0-9a-f]{8}\.so")


def belongs_to_torch(name: str, known: Container[str] = frozenset()) -> bool:
    """Return whether a name is torch's: by its namespace, or because ``known`` torch exports have it.

    Names of the C++ library alone are not, although some torch builds export copies of them: gcc-toolset
    leaves such names unversioned, and the host supplies them.
    """
    if _TORCH_NAMESPACE.search(name) and name.startswith("_Z"):
        return True
    if _STABLE_NAME.match(name) or _PYTHON_C_NAME.match(name):
        return True
    return not _RUNTIME_NAME.match(name) and not _PYTHON_NAME.match(name) and name in known


def is_torch_library(library: str) -> bool:
    """Return whether a library lives in torch/lib."""
    return _TORCH_LIBRARY.match(library) is not None


def is_bundled_copy(library: str) -> bool:
    """Return whether a library's name has the tag of auditwheel: a copy that only its own wheel can hold."""
    return _BUNDLED_TAG.search(library) is not None


def is_stable_interface(name: str) -> bool:
    """Return whether a name is of torch's stable C interface, which later releases keep."""
    return _STABLE_NAME.match(name) is not None


@lru_cache(maxsize=4096)
def demangle(name: str) -> str | None:
    """Return a C++ name as a person writes it, None for a C name or one that cannot be taken apart."""
    # Template names of kernels run to kilobytes; nobody reads those, and the parser is recursive.
    if not name.startswith("_Z") or len(name) > 2048 or _VECTOR_VARIANT.match(name):
        return None
    try:
        tree = itanium_demangler.parse(name)
        text = None if tree is None else _as_written(tree)
        return None if text is None or "<Node " in text else text
    except (RecursionError, NotImplementedError, ValueError, TypeError, AttributeError, IndexError, KeyError):
        return None


def _as_written(tree: Any) -> str:
    """Return a parsed name in C++ spelling, where the library's own text differs from it."""
    suffix = ""
    if tree.kind == "func" and tree.name.kind == "cv_qual":
        # The library takes a const member template's return type for its first argument.
        inner = tree.name.value
        suffix = " const" if "const" in tree.name.qual else ""
        arguments, result = tree.arg_tys, tree.ret_ty
        substitutes: tuple[Any, ...] = ()
        if inner.kind == "qual_name" and inner.value[-1].kind == "tpl_args":
            substitutes = inner.value[-1].value
            result, arguments = arguments[0], arguments[1:]
        tree = tree._replace(name=inner, arg_tys=arguments, ret_ty=result)
        text = str(tree) + suffix
        for number, substitute in enumerate(substitutes):
            text = text.replace("{T" + str(number) + "}", str(substitute))
    else:
        text = str(tree)
    text = _STRUCTOR.sub(lambda m: _structor(text[: m.start()], m["kind"]), text)
    return _LITERAL.sub(lambda m: m["value"], text.replace("(bool)1", "true").replace("(bool)0", "false"))


# `_ZGVdN4v_sin` is a vector variant of sin, which the library takes for a guard variable.
_VECTOR_VARIANT = re.compile(r"_ZGV[a-z][MN]\d*[vluRUL]")
_STRUCTOR = re.compile(r"\{(?:base |allocating |deleting )?(?P<kind>ctor|dtor)\}")
_LITERAL = re.compile(r"\((?:unsigned )?(?:int|long|short|char)\)(?P<value>-?\d)")


def _structor(before: str, kind: str) -> str:
    """Return the class name that stands for a constructor or destructor behind ``Class<…>::``."""
    owner = before.removesuffix("::")
    depth = 0
    for position in range(len(owner) - 1, -1, -1):
        depth += {">": 1, "<": -1}.get(owner[position], 0)
        if owner[position] == "<" and depth == 0:
            owner = owner[:position]
            break
        if depth == 0:
            break
    match = re.search(r"\w+$", owner)
    return ("~" if kind == "dtor" else "") + (match[0] if match else "{" + kind + "}")
