"""The ELF reader and the probe of an environment, on real small files, written ones, and damaged ones."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
from elf_writer import shared_object
from hypothesis import given, settings
from hypothesis import strategies as st

from bringup.abi import judge_environment, parse_environment
from bringup.paths import files, host_script

probe = host_script("abi_probe")
FIXTURES = Path(__file__).parent.parent / "fixtures" / "abi"
PROGRAM = files() / "abi_probe.py"
ONE = (FIXTURES / "libone.so.1.0").read_bytes()
TWO = (FIXTURES / "two.cpython-312-x86_64-linux-gnu.so").read_bytes()
SYSV = (FIXTURES / "libsysv.so").read_bytes()
NONE = (FIXTURES / "libnone.so").read_bytes()
STRIPPED = (FIXTURES / "stripped.so").read_bytes()
ALL = {"one": ONE, "two": TWO, "sysv": SYSV, "none": NONE, "stripped": STRIPPED}


def undefined(elf, *, weak: bool) -> dict[str, tuple[str | None, str | None]]:
    return {s.name: (s.version, s.library) for s in elf.undefined if s.is_weak == weak}


# --- what is read ---------------------------------------------------------------------------------------


def test_versions_of_exports_and_needs_are_told_apart():
    elf = probe.read_bytes(ONE)
    assert elf.soname == "libone.so.1"
    assert elf.needed == ("libc.so.6", "ld-linux-x86-64.so.2")
    assert {name: versions for name, versions in elf.exports.items() if not name.startswith("ONE_")} == {
        "first": ("ONE_1", "ONE_2"),
        "second": ("ONE_1",),
        "plain_data": ("ONE_2",),
        "thread_data": ("ONE_2",),
    }
    assert elf.version_definitions == ("ONE_1", "ONE_2")
    assert elf.version_needs == {"libc.so.6": ("GLIBC_2.2.5",), "ld-linux-x86-64.so.2": ("GLIBC_2.3",)}
    assert undefined(elf, weak=False) == {
        "free": ("GLIBC_2.2.5", "libc.so.6"),
        "malloc": ("GLIBC_2.2.5", "libc.so.6"),
        "strlen": ("GLIBC_2.2.5", "libc.so.6"),
        "__tls_get_addr": ("GLIBC_2.3", "ld-linux-x86-64.so.2"),
        "needed_of_nobody": (None, None),
    }


def test_weak_names_are_marked():
    assert set(undefined(probe.read_bytes(ONE), weak=True)) == {
        "_ITM_deregisterTMCloneTable",
        "_ITM_registerTMCloneTable",
        "__cxa_finalize",
        "__gmon_start__",
        "perhaps",
    }


def test_hidden_and_local_names_are_no_exports():
    assert not {"hidden_function", "local_function"} & set(probe.read_bytes(ONE).exports)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(TWO, {"rpath": (), "runpath": ("$ORIGIN/../lib", "/opt/else")}, id="runpath"),
        pytest.param(SYSV, {"rpath": ("$ORIGIN",), "runpath": ()}, id="rpath"),
        pytest.param(TWO, {"is_bind_now": False, "ignores_default_paths": False}, id="no flags"),
        pytest.param(SYSV, {"is_bind_now": True, "ignores_default_paths": True}, id="flags"),
        pytest.param(TWO, {"has_executable_stack": False}, id="stack"),
        pytest.param(SYSV, {"has_executable_stack": True}, id="executable stack"),
        pytest.param(TWO, {"exports": {"two": (), "beside": ()}, "soname": None}, id="exports by GNU hash"),
        pytest.param(SYSV, {"exports": {"two": (), "beside": ()}, "soname": None}, id="exports by SysV hash"),
        pytest.param(STRIPPED, {"exports": {"two": (), "beside": ()}}, id="no section headers"),
        pytest.param(TWO, {"needed": ("libone.so.1", "libc.so.6")}, id="needed"),
    ],
)
def test_dynamic_section(data, expected):
    elf = probe.read_bytes(data)
    assert {name: getattr(elf, name) for name in expected} == expected


def test_a_file_without_exports_has_its_undefined_names_counted():
    assert "puts" in undefined(probe.read_bytes(NONE), weak=False)


def test_a_file_without_exports_nor_section_headers_is_counted_by_its_string_table():
    stripped = bytearray(NONE)
    stripped[40:48] = bytes(8)
    assert "puts" in undefined(probe.read_bytes(bytes(stripped)), weak=False)


def test_aarch64_is_read_the_same():
    data = bytearray(TWO)
    data[18:20] = struct.pack("<H", 183)
    elf = probe.read_bytes(bytes(data))
    assert (elf.machine, elf.needed) == ("aarch64", ("libone.so.1", "libc.so.6"))


def test_a_file_and_its_bytes_read_alike(tmp_path):
    (tmp_path / "x.so").write_bytes(ONE)
    assert probe.read_file(str(tmp_path / "x.so")) == probe.read_bytes(ONE)


@pytest.mark.parametrize(
    ("wanted", "exports"),
    [
        pytest.param(set(), {}, id="none"),
        pytest.param({b"second", b"elsewhere"}, {"second": ("ONE_1",)}, id="some"),
    ],
)
def test_only_wanted_exports(tmp_path, wanted, exports):
    (tmp_path / "x.so").write_bytes(ONE)
    elf = probe.read_file(str(tmp_path / "x.so"), wanted)
    assert elf.exports == exports
    assert elf.undefined == probe.read_bytes(ONE).undefined


# --- what is refused ------------------------------------------------------------------------------------


def patched(data: bytes, offset: int, value: bytes) -> bytes:
    return data[:offset] + value + data[offset + len(value) :]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        pytest.param(b"", "NotShared", "empty file", id="0 bytes"),
        pytest.param(b"#!/bin/sh\n", "NotShared", "not ELF", id="script"),
        pytest.param(b"INPUT(libc.so.6)" * 10, "NotShared", "not ELF", id="linker script"),
        pytest.param(b"\x7fELF", "ElfError", "shorter than a file header", id="header only begun"),
        pytest.param(patched(TWO, 4, b"\1"), "NotShared", "32-bit", id="32-bit"),
        pytest.param(patched(TWO, 5, b"\2"), "NotShared", "big-endian", id="big-endian"),
        pytest.param(patched(TWO, 18, b"\xf3\0"), "NotShared", "machine 243", id="another machine"),
        pytest.param(patched(TWO, 16, b"\1\0"), "NotShared", "type 1", id="object file"),
        pytest.param(patched(TWO, 56, b"\0\0"), "ElfError", "0 program headers", id="no program headers"),
        pytest.param(patched(TWO, 54, b"\x20\0"), "ElfError", "of 32 bytes", id="odd program headers"),
        pytest.param(patched(TWO, 32, b"\xff" * 8), "ElfError", "truncated", id="program headers outside"),
        pytest.param(TWO[:100], "ElfError", "truncated", id="cut in the program headers"),
        pytest.param(TWO[:1000], "ElfError", "truncated: a segment ends", id="cut in the tables"),
        pytest.param(TWO[:2223], "ElfError", "truncated: a segment ends", id="cut behind the tables"),
    ],
)
def test_refusals(data, error, message):
    with pytest.raises(probe.ElfError, match=message) as caught:
        probe.read_bytes(data)
    assert type(caught.value).__name__ == error


@pytest.mark.parametrize("name", ["fifo", "directory", "device"])
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path, name):
    path = tmp_path / "x.so"
    if name == "fifo":
        os.mkfifo(path)
    elif name == "directory":
        path.mkdir()
    else:
        path = Path("/dev/null")
    with pytest.raises((probe.NotShared, OSError)):
        probe.read_file(str(path))


def dynamic_entry(data: bytes, tag: int) -> int:
    """Return the offset of a tag's value in the dynamic section."""
    count = struct.unpack_from("<H", data, 56)[0]
    headers = [struct.unpack_from("<IIQ", data, 64 + 56 * number) for number in range(count)]
    offset = next(offset for kind, _, offset in headers if kind == 2)
    while struct.unpack_from("<Q", data, offset)[0] != tag:
        offset += 16
    return offset + 8


PLAIN = shared_object(needed=["libc.so.6"], exports=["a", "b"], undefined=["c"])


@pytest.mark.parametrize(
    ("tag", "value", "message"),
    [
        pytest.param(5, 1 << 40, "no segment", id="strings outside"),
        pytest.param(6, 1 << 40, "no segment", id="symbols outside"),
        pytest.param(4, 1 << 40, "no segment", id="hash outside"),
        pytest.param(10, 1 << 62, "more than any real", id="huge strings"),
        pytest.param(10, 4, "string table|outside its", id="strings too short"),
        pytest.param(10, 1 << 20, "truncated", id="strings past the end"),
        pytest.param(11, 16, "symbols of 16 bytes", id="odd symbols"),
        pytest.param(1, 1 << 30, "outside its string table", id="needed name outside"),
    ],
)
def test_damaged_dynamic_sections(tag, value, message):
    with pytest.raises(probe.ElfError, match=message):
        probe.read_bytes(patched(PLAIN, dynamic_entry(PLAIN, tag), struct.pack("<Q", value)))


def test_a_huge_symbol_count_is_refused():
    count_at = struct.unpack_from("<Q", PLAIN, dynamic_entry(PLAIN, 4))[0] + 4
    with pytest.raises(probe.ElfError, match="4294967295 symbols"):
        probe.read_bytes(patched(PLAIN, count_at, b"\xff" * 4))


def test_a_version_index_that_nothing_defines_is_refused():
    indexes_at = struct.unpack_from("<Q", ONE, dynamic_entry(ONE, 0x6FFFFFF0))[0]
    with pytest.raises(probe.ElfError, match="symbol version 99 is not defined"):
        probe.read_bytes(patched(ONE, indexes_at + 2, b"\x63\0"))


def limited(path: Path) -> tuple[float, int, str]:
    """Read a file in a process of its own; return (seconds of CPU, peak MiB, what it said)."""
    program = (
        "import importlib.util, resource, sys\n"
        f"spec = importlib.util.spec_from_file_location('p', {str(PROGRAM)!r})\n"
        "p = importlib.util.module_from_spec(spec); sys.modules['p'] = p; spec.loader.exec_module(p)\n"
        "try:\n    p.read_file(sys.argv[1]); said = 'read'\n"
        "except p.ElfError as problem:\n    said = type(problem).__name__ + ': ' + str(problem)\n"
        "usage = resource.getrusage(resource.RUSAGE_SELF)\n"
        # ru_maxrss of a new process begins with what its parent had; VmHWM is its own.
        "peak = [line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0]\n"
        "print(usage.ru_utime + usage.ru_stime, int(peak) // 1024, said)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, str(path)], check=True, capture_output=True, text=True
    ).stdout
    seconds, mebibytes, said = answer.split(" ", 2)
    return float(seconds), int(mebibytes), said.strip()


def sparse(path: Path, head: bytes) -> Path:
    with path.open("wb") as file:
        file.write(head)
        file.truncate(2 << 30)
    return path


def greedy() -> bytes:
    """Return a file whose 300,000 symbols share the tails of one long string."""
    names, count = b"\0" + b"a" * 60_000 + b"\0", 300_000
    entries = b"".join(struct.pack("<IBBHQQ", 1 + index % 60_000, 0x12, 0, 0, 0, 0) for index in range(count))
    symbols_at = 176
    hash_at = symbols_at + 24 + len(entries)
    strings_at = hash_at + 8
    dynamic_at = (strings_at + len(names) + 7) & ~7
    tags = ((4, hash_at), (5, strings_at), (6, symbols_at), (10, len(names)), (11, 24), (0, 0))
    dynamic = b"".join(struct.pack("<QQ", *tag) for tag in tags)
    size = dynamic_at + len(dynamic)
    head = PLAIN[:64]
    load = struct.pack("<IIQQQQQQ", 1, 6, 0, 0, 0, size, size, 4096)
    place = struct.pack("<IIQQQQQQ", 2, 6, dynamic_at, dynamic_at, dynamic_at, len(dynamic), len(dynamic), 8)
    body = head + load + place + bytes(24) + entries + struct.pack("<II", 1, count + 1) + names
    return body.ljust(dynamic_at, b"\0") + dynamic


@pytest.mark.parametrize(
    ("head", "said"),
    [
        pytest.param(b"", "NotShared: not ELF", id="2 GiB of nothing"),
        pytest.param(PLAIN, "read", id="2 GiB behind the tables"),
        pytest.param(
            patched(PLAIN, dynamic_entry(PLAIN, 10), struct.pack("<Q", 2 << 30)),
            "ElfError: string table of 2147483648 bytes, more than any real one",
            id="2 GiB of strings",
        ),
        pytest.param(greedy(), "ElfError: more bytes of names than any real file has", id="shared tails"),
    ],
)
def test_time_and_memory_are_bounded(tmp_path, head, said):
    path = tmp_path / "x.so"
    if head == greedy():
        path.write_bytes(head)
    else:
        sparse(path, head)
    seconds, mebibytes, answer = limited(path)
    assert answer == said
    assert seconds < 5
    assert mebibytes < 256


# --- damaged files, at random ---------------------------------------------------------------------------

damage = st.lists(st.tuples(st.integers(0, 6000), st.binary(min_size=1, max_size=8)), min_size=1, max_size=6)


@settings(max_examples=400, deadline=2000)
@given(name=st.sampled_from(sorted(ALL)), changes=damage, cut=st.integers(0, 6000) | st.none())
def test_damaged_files_are_read_or_refused(name, changes, cut):
    data = bytearray(ALL[name])
    for offset, value in changes:
        end = min(len(data), offset + len(value))
        data[offset:end] = value[: max(0, end - offset)]
    data = bytes(data[:cut])
    for read in (probe.read_bytes, lambda d: probe.read_prefix(d, len(d), "x.so")):
        with contextlib.suppress(probe.ElfError):
            assert isinstance(read(data), probe.Elf)


@settings(max_examples=200, deadline=2000)
@given(
    needed=st.lists(st.text("abc.", min_size=1, max_size=8), max_size=4),
    exports=st.lists(st.text("abcXY_", min_size=1, max_size=12), unique=True, max_size=20),
    undefined_names=st.lists(st.text("defZ_", min_size=1, max_size=12), unique=True, max_size=20),
)
def test_what_is_written_is_read(needed, exports, undefined_names):
    elf = probe.read_bytes(shared_object(needed=needed, exports=exports, undefined=undefined_names))
    assert elf.needed == tuple(needed)
    assert set(elf.exports) == set(exports)
    assert [s.name for s in elf.undefined] == undefined_names


CORPUS = json.loads((FIXTURES / "corpus/outcomes.json").read_text())


@pytest.mark.parametrize(("name", "outcome"), [pytest.param(*item, id=item[0]) for item in CORPUS.items()])
def test_what_fuzzing_found_worth_keeping(name, outcome):
    data = (FIXTURES / "corpus" / name).read_bytes()
    kind, body = data[0] % 3, data[1:]
    try:
        if kind == 0:
            probe.read_bytes(body)
        else:
            missing, base = ((0, "x.so"), (1 << 28, "libone.so.1.0"))[kind - 1]
            probe.read_prefix(body, len(body) + missing, base)
        said = "read"
    except probe.ElfError as problem:
        said = f"{type(problem).__name__}: {problem}"
    assert said == outcome


# --- prefixes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["libone.so.1.0", "two.cpython-312-x86_64-linux-gnu.so", "stripped.so"])
def test_a_prefix_tells_the_same_as_the_file(name):
    data = (FIXTURES / name).read_bytes()
    whole, front = probe.read_bytes(data), probe.read_prefix(data[:2400], len(data) + (1 << 30), name)
    assert front.source == "prefix"
    assert set(front.needed) == set(whole.needed)
    same = ("machine", "soname", "exports", "undefined", "version_definitions", "version_needs")
    assert {n: getattr(front, n) for n in same} == {n: getattr(whole, n) for n in same}
    assert front.runpath == (*whole.rpath, *whole.runpath)


@pytest.mark.parametrize("name", ["libone.so.1.0", "two.cpython-312-x86_64-linux-gnu.so"])
def test_every_shorter_prefix_asks_for_more_and_gets_there(name):
    data = (FIXTURES / name).read_bytes()
    expected = probe.read_prefix(data, len(data), name)
    lengths, found = [0], None
    while found is None:
        try:
            found = probe.read_prefix(data[: lengths[-1]], len(data), name)
        except probe.PrefixTooShort as short:
            lengths.append(short.wanted_bytes)
    assert found == expected
    assert lengths == sorted(set(lengths))
    assert len(lengths) < 40
    assert lengths[-1] < len(data)


@settings(max_examples=300, deadline=2000)
@given(length=st.integers(0, len(ONE)), name=st.sampled_from(["one", "two"]))
def test_no_prefix_tells_something_else(length, name):
    data = ALL[name]
    try:
        front = probe.read_prefix(data[:length], len(data), "x.so")
    except probe.PrefixTooShort:
        return
    whole = probe.read_bytes(data)
    assert (front.exports, front.undefined) == (whole.exports, whole.undefined)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(NONE, "exports nothing", id="no exports"),
        pytest.param(SYSV, "no GNU hash table", id="SysV hash only"),
        pytest.param(patched(TWO, 32, struct.pack("<Q", 5000)), "moved to offset 5000", id="patchelf"),
    ],
)
def test_tables_elsewhere_are_said_to_be_unreadable(data, message):
    with pytest.raises(probe.PrefixUnreadable, match=message):
        probe.read_prefix(data, len(data), "x.so")


def test_a_blanked_rpath_does_not_end_the_strings():
    path = b"$ORIGIN/../lib:/opt/else"
    assert TWO.count(path) == 1
    data = TWO.replace(path, bytes(len(path)))
    front = probe.read_prefix(data, len(data), "two.so")
    assert front.undefined == probe.read_bytes(TWO).undefined
    assert front.version_needs == probe.read_bytes(TWO).version_needs
    assert front.runpath == ()


@pytest.mark.parametrize(
    ("name", "soname", "needed"),
    [
        pytest.param("libthree.so.1.2", "libthree.so.1", {"libone.so.1", "libc.so.6"}, id="own name"),
        pytest.param("a.libs/libthree-0481ee11.so.1", "libthree.so.1", {"libone.so.1", "libc.so.6"}, id="bundled copy"),
        pytest.param("other.so", None, {"libone.so.1", "libc.so.6", "libthree.so.1"}, id="cannot be told"),
    ],
)
def test_the_name_of_the_file_tells_its_soname_from_what_it_needs(name, soname, needed):
    data = (FIXTURES / "libthree.so.1.2").read_bytes()
    front = probe.read_prefix(data, len(data), name)
    assert (front.soname, set(front.needed)) == (soname, needed)


def test_a_changed_name_is_not_believed():
    data = TWO.replace(b"\0beside\0", b"\0beyond\0")
    assert data != TWO
    with pytest.raises(probe.PrefixUnreadable):
        probe.read_prefix(data, len(data), "two.so")


def test_more_bytes_than_the_file_has_are_refused():
    with pytest.raises(probe.ElfError, match="4072 bytes given of a file of 10"):
        probe.read_prefix(TWO, 10, "two.so")


# --- the loader -----------------------------------------------------------------------------------------


def loader_cache(entries: list[tuple[int, str, str]]) -> bytes:
    head = b"glibc-ld.so.cache1.1"
    strings, table = b"", b""
    base = 48 + 24 * len(entries)
    for kind, name, path in entries:
        table += struct.pack("<iIIIQ", kind, base + len(strings), base + len(strings) + len(name) + 1, 0, 0)
        strings += name.encode() + b"\0" + path.encode() + b"\0"
    return head + struct.pack("<II", len(entries), len(strings)) + bytes(20) + table + strings


def test_loader_cache_keeps_the_first_entry_of_the_machine(tmp_path):
    (tmp_path / "cache").write_bytes(
        loader_cache(
            [
                (0x0803, "libx.so.1", "/usr/libx32/libx.so.1"),
                (0x0303, "libx.so.1", "/opt/first/libx.so.1"),
                (0x0303, "libx.so.1", "/opt/second/libx.so.1"),
            ]
        )
    )
    assert probe.read_loader_cache(str(tmp_path / "cache")) == {"libx.so.1": "/opt/first/libx.so.1"}


@pytest.mark.parametrize(
    "data",
    [b"", b"ld.so-1.7.0\0", loader_cache([(0x0303, "a", "b")])[:60], b"glibc-ld.so.cache1.1" + b"\xff" * 40],
    ids=["empty", "old format", "cut", "absurd count"],
)
def test_damaged_loader_caches_are_refused(tmp_path, data):
    (tmp_path / "cache").write_bytes(data)
    with pytest.raises(probe.ElfError):
        probe.read_loader_cache(str(tmp_path / "cache"))


def test_the_real_loader_cache_agrees_with_ldconfig():
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    expected: dict[str, str] = {}
    for line in listed.splitlines():
        if "(libc6,x86-64)" in line:
            name, path = line.split(" (libc6,x86-64) => ")
            expected.setdefault(name.strip(), path)
    assert probe.read_loader_cache() == expected


class Tree:
    """Written shared objects in a directory, and a loader that knows no others."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.loader = probe.Loader("x86_64", {}, ())

    def write(self, path: str, **content) -> str:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(shared_object(**content))
        return str(target)

    def load(self, path: str, process=None, siblings=None):
        return self.loader.load(self.loader.object(path), process or {}, siblings)


@pytest.fixture
def tree(tmp_path) -> Tree:
    return Tree(tmp_path)


def names(load) -> list[str]:
    return [Path(found.path).name for found in load.scope]


def test_scope_is_breadth_first(tree):
    tree.write("lib/libb.so", needed=["libd.so"], runpath="$ORIGIN")
    tree.write("lib/libc_.so")
    tree.write("lib/libd.so")
    top = tree.write("top.so", needed=["libb.so", "libc_.so"], runpath="$ORIGIN/lib")
    assert names(tree.load(top)) == ["top.so", "libb.so", "libc_.so", "libd.so"]


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        pytest.param("rpath", ["top.so", "libb.so", "libd.so"], id="RPATH serves what is loaded for it"),
        pytest.param("runpath", ["top.so", "libb.so"], id="RUNPATH serves its own file alone"),
    ],
)
def test_search_path_of_the_loader_chain(tree, kind, found):
    tree.write("lib/libb.so", needed=["libd.so"])
    tree.write("lib/libd.so")
    top = tree.write("top.so", needed=["libb.so"], **{kind: "$ORIGIN/lib"})
    load = tree.load(top)
    assert names(load) == found
    missing = [] if "libd.so" in found else [("libd.so", str(tree.root / "lib/libb.so"))]
    assert list(load.missing) == missing


@pytest.mark.parametrize(("kind", "is_found"), [("rpath", True), ("runpath", False)])
def test_the_executables_rpath_serves_every_load(tree, kind, is_found):
    tree.write("conda/lib/libstdc++.so.6")
    tree.loader.executable = tree.loader.object(tree.write("conda/bin/python3", **{kind: "$ORIGIN/../lib"}))
    top = tree.write("site/_C.so", needed=["libstdc++.so.6"])
    assert any("conda" in found.path for found in tree.load(top).scope) is is_found


def test_a_copy_answers_to_its_soname_only_once_it_is_loaded(tree):
    # A wheel's own copy keeps the soname of the library that it copies.
    copy = tree.write("x.libs/libcudart.e8e8b82a.so.12", soname="libcudart.so.12")
    late = tree.write("late.so", needed=["libcudart.so.12"], runpath="$ORIGIN/x.libs")
    assert [m.name for m in tree.load(late).missing] == ["libcudart.so.12"]
    user = tree.write("user.so", needed=["libcudart.e8e8b82a.so.12"], runpath="$ORIGIN/x.libs")
    after = tree.load(user)
    assert not after.missing
    assert names(tree.load(late, after.names)) == ["late.so", Path(copy).name]


def test_a_library_of_another_machine_is_passed_over(tree):
    tree.write("first/libb.so", machine=183)
    tree.write("second/libb.so")
    top = tree.write("top.so", needed=["libb.so"], runpath="$ORIGIN/first:$ORIGIN/second")
    assert [found.path for found in tree.load(top).scope][1] == str(tree.root / "second/libb.so")


def test_a_library_found_only_among_the_siblings_is_said_to_be(tree):
    sibling = tree.write("pkg/lib/libown.so")
    top = tree.write("pkg/_C.so", needed=["libown.so"])
    load = tree.load(top, siblings={"libown.so": sibling})
    assert (names(load), load.siblings, load.missing) == (["_C.so", "libown.so"], ("libown.so",), ())


def test_libraries_that_need_each_other_end(tree):
    tree.write("liba.so", needed=["libb.so"], runpath="$ORIGIN")
    tree.write("libb.so", needed=["liba.so"], runpath="$ORIGIN")
    top = tree.write("top.so", needed=["liba.so"], runpath="$ORIGIN")
    assert names(tree.load(top)) == ["top.so", "liba.so", "libb.so"]


# --- an environment -------------------------------------------------------------------------------------


@pytest.fixture
def environment(tree) -> Path:
    """A small environment: a torch with one CUDA wheel, and an extension."""
    site = "lib/python3.12/site-packages"
    torch = f"{site}/torch/lib"
    cuda = "$ORIGIN/../../nvidia/cuda_runtime/lib"
    tree.write("bin/python3", exports=["PyModule_Create2"])
    tree.write(f"{torch}/libtorch_global_deps.so", needed=["libcudart.so.12"], rpath=cuda)
    tree.write(f"{torch}/libc10.so", soname="libc10.so", exports=["_ZN3c105ErrorC1Ev", "unneeded"])
    tree.write(
        f"{torch}/libtorch_python.so",
        soname="libtorch_python.so",
        needed=["libc10.so"],
        rpath="$ORIGIN",
        undefined=["PyModule_Create2"],
    )
    tree.write(f"{site}/nvidia/cuda_runtime/lib/libcudart.so.12", soname="libcudart.so.12", exports=["cudaMalloc"])
    tree.write(f"{site}/nvidia/cuda_nvrtc/lib/libnvrtc.so.12", soname="libnvrtc.so.12")
    tree.write(f"{site}/nvidia/cuda_nvrtc/lib/libnvrtc-builtins.so.12.8", soname="libnvrtc-builtins.so.12.8")
    tree.write(f"{site}/nvidia/nvjitlink/lib/libnvJitLink.so.12", soname="libnvJitLink.so.12")
    tree.write(
        f"{site}/ext/_C.so",
        needed=["libc10.so", "libnvrtc.so.12", "libcuda.so.1"],
        undefined=["_ZN3c105ErrorC1Ev", "cudaMalloc", "cuInit", "PyModule_Create2"],
        weak=["_ITM_registerTMCloneTable"],
    )
    root = tree.root / site
    (root / "ext/broken.so").write_bytes(TWO[:900])
    (root / "ext/notes.so.txt").write_text("no shared object")
    (root / "torch/version.py").write_text(
        "__version__ = '2.9.1+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
    )
    (root / "ext-1.0.dist-info").mkdir()
    (root / "ext-1.0.dist-info/RECORD").write_text("ext/_C.so,sha256=x,1\next/broken.so,sha256=x,1\next/a.py,,\n")
    (root / "ext-1.0.dist-info/METADATA").write_text(
        'Name: ext\nRequires-Dist: torchvision\nRequires-Dist: torch ; extra == "all"\n'
        "Requires-Dist: torch==2.9.*\n\nRequires-Dist: torch==1\n"
    )
    (root / "none-1.0.dist-info").mkdir()
    return tree.root


def run(*arguments: str, stdin: str = "") -> dict:
    said = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], check=True, capture_output=True, text=True, input=stdin
    )
    assert said.stderr == ""
    assert said.stdout.count("\n") == 1
    return json.loads(said.stdout)


def test_answer(environment):
    answer = run(str(environment))
    table = answer["files"]
    base = [Path(entry["path"]).name for entry in table]
    assert answer["schema"] == 1
    assert (answer["python"], answer["machine"]) == ("3.12", os.uname().machine)
    assert answer["torch"] == {"version": "2.9.1+cu128", "cuda": "12.8"}
    unknown = {"version": "unknown", "requires_torch": None}
    ext = {"version": "1.0", "requires_torch": "torch==2.9.*"}
    assert answer["distributions"] == {"ext": ext, "nvidia": unknown, "torch": unknown}
    assert [base[n] for n in answer["process"]["loads"]] == [
        "python3",
        "libtorch_global_deps.so",
        "libcudart.so.12",
        "libnvrtc.so.12",
        "libnvrtc-builtins.so.12.8",
        "libnvJitLink.so.12",
        "libtorch_python.so",
        "libc10.so",
    ]
    assert [base[n] for n in answer["process"]["global"]] == ["python3", "libtorch_global_deps.so", "libcudart.so.12"]
    assert answer["process"]["missing"] == []
    assert list(answer["unreadable"]) == [f"{environment}/lib/python3.12/site-packages/ext/broken.so"]
    assert answer["unreadable"].popitem()[1]["distribution"] == "ext"
    extension = table[base.index("_C.so")]
    assert extension["distribution"] == "ext"
    assert [base[n] for n in extension["scope"]] == ["_C.so", "libc10.so", "libnvrtc.so.12"]
    assert [name for name, _ in extension["missing"]] == ["libcuda.so.1"]
    assert {answer["names"][n] for n in extension["undefined"]} == {
        "_ZN3c105ErrorC1Ev",
        "cudaMalloc",
        "cuInit",
        "PyModule_Create2",
    }
    exports = {base[i]: {answer["names"][n] for n in entry["exports"]} for i, entry in enumerate(table)}
    assert exports["libc10.so"] == {"_ZN3c105ErrorC1Ev"}
    assert exports["python3"] == {"PyModule_Create2"}


@pytest.fixture(scope="module")
def schema() -> dict:
    return json.loads((FIXTURES.parents[2] / "docs/reference/abi-probe.schema.json").read_text())


def test_the_answer_is_what_the_schema_says(environment, schema):
    jsonschema.validate(run(str(environment)), schema)


def test_a_failure_is_what_the_schema_says(tmp_path, schema):
    jsonschema.validate(run(str(tmp_path)), schema)


def test_the_schema_knows_every_key(environment, schema):
    said = run(str(environment))
    assert set(said) == set(schema["$defs"]["answer"]["properties"])
    assert {key for file in said["files"] for key in file} == set(schema["$defs"]["file"]["properties"])


def test_wanted_names_are_looked_for_and_remembered(environment):
    answer = run(str(environment), "--wanted", "-", stdin="unneeded\nof_nobody\n")
    libc10 = next(e for e in answer["files"] if e["path"].endswith("libc10.so"))
    assert {answer["names"][n] for n in libc10["exports"]} == {"_ZN3c105ErrorC1Ev", "unneeded"}
    assert "of_nobody" in answer["names"]


def test_library_path_is_searched(environment, tmp_path_factory):
    stub = tmp_path_factory.mktemp("stub")
    (stub / "libcuda.so.1").write_bytes(shared_object(exports=["cuInit"], soname="libcuda.so.1"))
    answer = run(str(environment), "--library-path", str(stub))
    extension = next(e for e in answer["files"] if e["path"].endswith("_C.so"))
    assert extension["missing"] == []


def test_an_environment_without_torch_holds_only_the_interpreter(environment):
    (environment / "lib/python3.12/site-packages/torch/version.py").unlink()
    answer = run(str(environment))
    assert answer["torch"] is None
    assert [Path(answer["files"][n]["path"]).name for n in answer["process"]["loads"]] == ["python3"]


@pytest.mark.parametrize(
    "place", ["", "lib/python3.12/site-packages", "bin/python3"], ids=["prefix", "site", "interpreter"]
)
def test_an_environment_is_found_by(environment, place):
    assert run(str(environment / place))["torch"] == {"version": "2.9.1+cu128", "cuda": "12.8"}


@pytest.mark.parametrize("place", ["nowhere", "empty"])
def test_no_environment_is_an_answer_with_an_error(tmp_path, place):
    (tmp_path / "empty").mkdir()
    answer = run(str(tmp_path / place))
    assert "holds no Python packages" in answer["error"]


def test_links_do_not_lead_out_of_the_environment(environment, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret.so").write_bytes(PLAIN)
    site = environment / "lib/python3.12/site-packages"
    (site / "ext/linked.so").symlink_to(outside / "secret.so")
    (site / "ext/linked").symlink_to(outside, target_is_directory=True)
    assert not [e for e in run(str(environment))["files"] if "secret" in e["path"] or "linked" in e["path"]]


def test_the_probe_changes_nothing(environment):
    def state() -> dict[str, tuple[int, int]]:
        return {str(p): (p.lstat().st_mtime_ns, p.lstat().st_size) for p in environment.rglob("*")}

    before = state()
    run(str(environment))
    assert state() == before


def test_the_probe_is_small_enough_to_travel():
    # One argument of a command holds 131,071 bytes, and quoting twice more than doubles a script.
    import base64
    import zlib

    assert len(base64.b64encode(zlib.compress(PROGRAM.read_bytes(), 9))) < 40_000


def test_reading_is_fast():
    exports = [f"_ZN5torch3jit6Object{n}E{'x' * 80}" for n in range(20_000)]
    data = shared_object(exports=exports)
    best = min(_seconds(lambda: probe.read_bytes(data)) for _ in range(3))
    # libtorch_cpu has 80,000 and is read in 0.1 s; a loaded machine may take ten times that.
    assert best < 0.5


def _seconds(action) -> float:
    before = time.process_time()
    action()
    return time.process_time() - before


def test_the_probe_is_python_3_8_and_uses_the_standard_library_alone():
    tree = ast.parse(PROGRAM.read_text(), feature_version=(3, 8))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) if node.module}
    assert modules <= set(sys.stdlib_module_names) | {"__future__"}


def plain_gnu_hash(name: bytes) -> int:
    value = 5381
    for byte in name:
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value


@given(st.lists(st.binary(max_size=200), max_size=30))
@settings(max_examples=200, deadline=None)
def test_many_names_hash_as_one_after_the_other(names):
    assert probe._gnu_hashes(names) == [plain_gnu_hash(name) for name in names]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(b"", 0x1505, id="nothing"),
        pytest.param(b"printf", 0x156B2BB8, id="the specification's example"),
        pytest.param(b"\xff" * 4096, plain_gnu_hash(b"\xff" * 4096), id="the largest values"),
    ],
)
def test_hash_of_one_name(name, value):
    assert probe._gnu_hashes([name]) == [value]


REQUIRES = "Name: x\nRequires-Dist: torch==2.9.*\n"


@pytest.mark.parametrize(
    ("written", "file", "known", "wanted"),
    [
        pytest.param({}, "my_ext/ops.so", [], ("my-ext", "unknown", None), id="nothing tells"),
        pytest.param({}, "_my_ext.cpython-312-x86_64-linux-gnu.so", [], ("my-ext", "unknown", None), id="a module"),
        pytest.param(
            {"My_Ext-2.1.dist-info/METADATA": REQUIRES}, "my_ext/ops.so", [], ("my-ext", "2.1", "torch==2.9.*"),
            id="no RECORD",
        ),
        pytest.param(
            {"Ext-2.1.egg-info/top_level.txt": "other\nmy_ext\n"}, "my_ext/a/ops.so", [], ("ext", "2.1", None),
            id="another name, of a Linux distribution",
        ),
        pytest.param(
            {"ext-2.1-py3.12.egg-info/PKG-INFO": ""}, "ext/ops.so", [], ("ext", "2.1", None), id="an old egg"
        ),
        pytest.param(
            {"my_ext-2.1.dist-info/METADATA": REQUIRES}, "my_ext/ops.so", ["my-ext"],
            ("my-ext-unrecorded", "unknown", None), id="its RECORD lists others",
        ),
    ],
)  # fmt: skip
def test_to_whom_a_file_without_a_record_belongs(tmp_path, written, file, known, wanted):
    for path, text in {**written, file: ""}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    path = str(tmp_path / file)
    found, owners = probe.unrecorded(str(tmp_path), [path], known)
    name, version, requires = wanted
    assert owners == {path: name}
    assert found == {name: {"version": version, "requires_torch": requires}}


def test_what_has_no_record_is_judged(environment):
    """A package of a Linux distribution: its files are known, and nothing says which are its own."""
    (environment / "lib/python3.12/site-packages/ext-1.0.dist-info/RECORD").unlink()
    found = parse_environment(run(str(environment)))
    verdicts = {verdict.name: verdict for verdict in judge_environment(found)}
    assert verdicts["torch"].level == "ok"
    assert verdicts["ext"].version == "1.0"
    assert verdicts["ext"].level.is_broken
    assert [file.path for file in verdicts["ext"].files] == ["ext/_C.so", "ext/broken.so"]
