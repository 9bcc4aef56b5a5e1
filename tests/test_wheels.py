"""Wheels read in ranges: what is found, what is fetched, and every way in which a server or a wheel can lie."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import random
import struct
import time
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import httpx
import pytest
from files.elf_writer import shared_object
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranged_server import LOGIN, serving

from bringup.errors import BringupError, InputError
from bringup.package_index import DefaultIndex, Source, Sources
from bringup.wheels import Archive, HttpFile, Indexes, open_local, open_source, read_wheel, reader, record_of
from bringup.wheels import archive as archive_module
from bringup.wheels import remote as remote_module

FIXTURES = Path(__file__).parent / "fixtures" / "abi"
FILE = "demo-1.2-cp310-abi3-manylinux2014_x86_64.whl"
METADATA = "Metadata-Version: 2.1\nName: demo\nVersion: 1.2\nRequires-Dist: torch==2.9.1\nRequires-Dist: numpy\n"
UNDEFINED = ("_ZN3c104demoEv", "torch_list_size")
EXTENSION = shared_object(needed=["libc10.so", "libtorch.so"], undefined=UNDEFINED, exports=["PyInit_demo"])
# Incompressible, so that ranges have something to leave out.
NOISE = random.Random(5).randbytes(600_000)


def record_line(path: str, data: bytes) -> bytes:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return path.encode() + b",sha256=" + digest + b",%d\n" % len(data)


def wheel(
    files: dict[str, bytes] | None = None,
    *,
    metadata: str = METADATA,
    record: bytes | None = None,
    method: int = zipfile.ZIP_DEFLATED,
) -> bytes:
    """Return a wheel's bytes; its extension stands first, so that it is not fetched with the directory."""
    memory = io.BytesIO()
    contents = {
        "demo/ext.abi3.so": EXTENSION,
        "demo/noise.bin": NOISE,
        **(files or {}),
        "demo-1.2.dist-info/METADATA": metadata.encode(),
        "demo-1.2.dist-info/RECORD": record or record_line("demo/ext.abi3.so", EXTENSION),
    }
    with zipfile.ZipFile(memory, "w", method) as archive:
        for path, data in contents.items():
            archive.writestr(zipfile.ZipInfo(path), data, compress_type=method)
    return memory.getvalue()


GOOD = wheel()


@pytest.fixture
def http():
    with httpx.Client(timeout=1.0, follow_redirects=True, trust_env=False) as client:
        yield client


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(remote_module.time, "sleep", lambda _: None)


def read(http, served, **known):
    with open_source(http, served.url, **known) as source:
        return read_wheel(source, FILE)


# --- what is read ---------------------------------------------------------------------------------------


def test_a_wheel_is_read_by_ranges_alone(http):
    with serving(GOOD) as served:
        facts = read(http, served)
    (file,) = facts.distribution.files
    assert (facts.distribution.name, facts.distribution.version) == ("demo", "1.2")
    assert facts.distribution.requires_torch == "==2.9.1"
    assert facts.distribution.promised_glibc == "2.17"
    assert facts.requires == ("torch==2.9.1", "numpy")
    assert (file.path, file.undefined, file.needed) == (
        "demo/ext.abi3.so",
        frozenset(UNDEFINED),
        ("libc10.so", "libtorch.so"),
    )
    assert facts.size_bytes == len(GOOD)
    assert facts.fetched_bytes < 100_000
    assert served.asked[0] == "bytes=-65557"
    assert None not in served.asked


@pytest.mark.parametrize(
    ("manner", "how", "requests"),
    [
        pytest.param("good", "member", 2, id="ranges"),
        pytest.param("no-ranges", "wheel", 1, id="no ranges: the whole wheel once"),
        pytest.param("cut-once", "member", 3, id="a range cut once is asked for again"),
        pytest.param("failing-once", "member", 3, id="busy once"),
        pytest.param("redirected", "member", 3, id="a redirect is followed once"),
        pytest.param("expiring", "member", 5, id="a redirect that runs out is asked for again"),
    ],
)
def test_what_goes_well_in_the_end(http, manner, how, requests):
    with serving(GOOD, manner) as served:
        facts = read(http, served)
    assert facts.distribution.files[0].undefined == frozenset(UNDEFINED)
    assert dict(facts.read) == {"demo/ext.abi3.so": how}
    assert len(served.asked) == requests


@pytest.mark.parametrize(
    ("manner", "says"),
    [
        ("no-ranges-no-length", "no ranges and no Content-Length"),
        ("no-ranges-cut", "cut after|peer closed|incomplete"),
        ("ranges-at-first", "sent the whole file"),
        ("cut", "cut after|peer closed|incomplete"),
        ("short", "cut after"),
        ("long", "more bytes than it was asked for"),
        ("shifted", "another range than it was asked for"),
        ("silently-shifted", "not a sound wheel"),
        ("grown", "another length than before"),
        ("replaced", "replaced by another file"),
        ("no-content-range", "no usable Content-Range"),
        ("huge", "more than any real wheel"),
        ("compressed", "compresses what it was asked for"),
        ("failing", "answered 503"),
        ("absent", "answered 404"),
        ("out-of-range", "answered 416"),
        ("locked", "answered 401"),
        ("circle", "redirects in circles"),
        ("hanging-up", "disconnected"),
        ("stalling", "peer closed|timed out|cut after"),
    ],
    ids=lambda value: value.split("|")[0],
)
def test_a_server_that_misbehaves_ends_in_an_error(http, manner, says):
    started = time.monotonic()
    with serving(GOOD, manner) as served, pytest.raises(BringupError, match=f"(?is){says}") as raised:
        read(http, served)
    assert served.url in str(raised.value)
    assert time.monotonic() - started < 15


@pytest.mark.parametrize(
    ("manner", "known", "says"),
    [
        pytest.param("good", {"size_bytes": len(GOOD) - 1}, "another length", id="longer than the index says"),
        pytest.param("no-ranges", {"size_bytes": len(GOOD) + 1}, "than the index says", id="whole, of another length"),
        pytest.param("no-ranges-other-file", {"sha256": "0" * 64}, "wanted sha256 0000", id="whole, of another hash"),
    ],
)
def test_what_the_index_said_is_held_against_the_server(http, manner, known, says):
    with serving(GOOD, manner) as served, pytest.raises(BringupError, match=says):
        read(http, served, **known)


def test_a_whole_wheel_with_the_right_hash_is_read(http):
    with (
        serving(GOOD, "no-ranges") as served,
        open_source(http, served.url, sha256=hashlib.sha256(GOOD).hexdigest(), whole=True) as source,
    ):
        assert source.whole
        assert source.fetched_bytes == len(GOOD)
    assert served.asked == [None]


def test_a_login_goes_to_its_server_and_is_not_carried_elsewhere(http):
    with serving(GOOD, "locked") as served:
        assert read(http, served, login=LOGIN).distribution.name == "demo"
    with serving(GOOD) as elsewhere, serving(GOOD) as served:
        remote = HttpFile(http, served.url, login=LOGIN)
        remote._url = elsewhere.url
        remote.read(0, 10)
    assert served.logins[0] is not None
    assert elsewhere.logins == [None]


def test_a_slow_server_is_given_up(http, monkeypatch):
    monkeypatch.setattr(remote_module, "_PATIENCE_S", -100.0)
    with serving(GOOD) as served, pytest.raises(BringupError, match="too slow"):
        read(http, served)


def test_neighbouring_ranges_travel_together(http):
    with serving(GOOD) as served:
        remote = HttpFile(http, served.url)
        parts = remote.read_many([(50_000, 10), (0, 100), (200, 100), (300_000, 5), (49_000, 1000)])
        assert parts == [GOOD[50_000:50_010], GOOD[:100], GOOD[200:300], GOOD[300_000:300_005], GOOD[49_000:50_000]]
    assert sorted(served.asked[1:]) == ["bytes=0-299", "bytes=300000-300004", "bytes=49000-50009"]


# --- what wheels can be ---------------------------------------------------------------------------------


def facts_of(data: bytes, tmp_path: Path):
    path = tmp_path / FILE
    path.write_bytes(data)
    with open_local(path) as source:
        return read_wheel(source, FILE)


def test_a_front_of_a_large_member_is_enough(http):
    """The real extension with 3 MB of noise as its last section: nothing behind its tables is fetched."""
    real = (FIXTURES / "libone.so.1.0").read_bytes()
    with serving(wheel({"demo/large.so": real + NOISE * 5})) as served:
        facts = read(http, served)
    assert facts.read["demo/large.so"] == "prefix"
    large = next(f for f in facts.distribution.files if f.name == "large.so")
    assert large.exports >= {"first", "second", "plain_data"}
    assert not large.is_exact
    assert facts.fetched_bytes < 300_000


def test_a_member_without_tables_at_its_front_is_fetched_whole(http):
    """A SysV hash table cannot be told at the front, so the whole of the member travels, and is exact."""
    with serving(wheel({"demo/large.so": EXTENSION + NOISE})) as served:
        facts = read(http, served)
    assert facts.read["demo/large.so"] == "member"
    assert next(f for f in facts.distribution.files if f.name == "large.so").is_exact
    assert len(NOISE) < facts.fetched_bytes < 2 * len(NOISE)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        pytest.param(b"", "empty file", id="empty"),
        pytest.param(b"GROUP ( libc.so.6 )", "not ELF", id="linker script"),
        pytest.param(EXTENSION[:200], "truncated", id="truncated"),
        pytest.param(b"\x7fELF\x01" + bytes(200), "32-bit ELF", id="32-bit"),
        pytest.param(
            shared_object(exports=["x"], machine=183), "for aarch64, its wheel for x86_64", id="other machine"
        ),
    ],
)
def test_an_unreadable_file_is_said_to_be(data, says, tmp_path):
    facts = facts_of(wheel({"demo/bad.so": data}), tmp_path)
    problems = {file.name: file.problem for file in facts.distribution.files}
    assert says in problems["bad.so"]
    assert problems["ext.abi3.so"] is None


def test_stored_members_and_data_directories(tmp_path):
    data = wheel({"demo-1.2.data/purelib/demo/other.so": EXTENSION}, method=zipfile.ZIP_STORED)
    facts = facts_of(data, tmp_path)
    assert [file.path for file in facts.distribution.files] == ["demo/ext.abi3.so", "demo/other.so"]


def test_record_gives_hashes_by_path(tmp_path):
    path = tmp_path / FILE
    path.write_bytes(GOOD)
    with open_local(path) as source:
        assert record_of(Archive(source)) == {
            "demo/ext.abi3.so": hashlib.sha256(EXTENSION).hexdigest(),
        }


# --- wheels that lie ------------------------------------------------------------------------------------


def entries(data: bytes) -> list[int]:
    """Return where the directory's entries begin."""
    (start,) = struct.unpack_from("<L", data, len(data) - 6)
    found = []
    while data[start : start + 4] == b"PK\1\2":
        found.append(start)
        name, extra, comment = struct.unpack_from("<3H", data, start + 28)
        start += 46 + name + extra + comment
    return found


def patched(offset: int, layout: str, value: int, *, entry: int = 0, data: bytes = GOOD) -> bytes:
    """Return a wheel with one field of a directory entry changed."""
    changed = bytearray(data)
    struct.pack_into(layout, changed, entries(data)[entry] + offset, value)
    return bytes(changed)


def renamed(new: bytes, old: bytes = b"demo/noise.bin") -> bytes:
    assert len(new) == len(old)
    return GOOD.replace(old, new)


def bomb(size_bytes: int) -> bytes:
    """Return a wheel whose extension is zeros that deflate to a thousandth."""
    return wheel({"demo/bomb.so": b"\x7fELF\x02\x01\x01" + bytes(size_bytes)})


def nested_overlap() -> bytes:
    """Return a wheel two of whose members share their data: the second entry points at the first one's header."""
    data = bytearray(GOOD)
    first, second = entries(GOOD)[:2]
    struct.pack_into("<L", data, second + 42, struct.unpack_from("<L", data, first + 42)[0])
    return bytes(data)


def doubled() -> bytes:
    memory = io.BytesIO(GOOD)
    with zipfile.ZipFile(memory, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("demo/noise.bin", b"again")
    return memory.getvalue()


LIES = {
    "empty file": (b"", "no zip file"),
    "no zip file": (b"x" * 5000, "no zip file"),
    "end record alone": (b"PK\5\6" + bytes(18), r"0 of its members are \*.dist-info/METADATA"),
    "cut at the end": (GOOD[:-30], "no zip file"),
    "behind other data": (b"#!" + GOOD, "does not lie where"),
    "entry count too high": (GOOD[:-14] + struct.pack("<HH", 5, 5) + GOOD[-10:], "cut off"),
    "entry count too low": (GOOD[:-14] + struct.pack("<HH", 1, 1) + GOOD[-10:], "more than it claims"),
    "several disks": (GOOD[:-18] + struct.pack("<HH", 1, 1) + GOOD[-14:], "in several"),
    "directory of gigabytes": (GOOD[:-10] + struct.pack("<L", 0xF0000000) + GOOD[-6:], "its directory claims"),
    "zip64 record missing": (GOOD[:-6] + struct.pack("<L", 0xFFFFFFFF) + GOOD[-2:], "large-file record is missing"),
    "zip64 sizes missing": (patched(24, "<L", 0xFFFFFFFF), "no usable sizes"),
    "encrypted": (patched(8, "<H", 1), "encrypted"),
    "unknown method": (patched(10, "<H", 99), "does not agree with|packed by method"),
    "members overlap": (nested_overlap(), "overlaps what comes behind it"),
    "packed size too large": (patched(20, "<L", 700_000), "overlaps what comes behind it"),
    "packed size too small": (patched(20, "<L", 20), "cut off|inflates to|ends before"),
    "size too large": (patched(24, "<L", len(EXTENSION) + 1), "inflates to .* and claims"),
    "size too small": (patched(24, "<L", len(EXTENSION) - 1), "inflates to more than"),
    "wrong checksum": (patched(16, "<L", 7), "checksum"),
    "offset beyond the end": (patched(42, "<L", 0x7FFFFFFF), "overlaps"),
    "own header of another name": (GOOD.replace(b"demo/ext.abi3.so", b"demo/exx.abi3.so", 1), "what calls itself"),
    "same name twice": (doubled(), "in it twice"),
    "climbs out": (renamed(b"../../oise.bin"), "would not stay"),
    "absolute": (renamed(b"/etc/noise.bin"), "would not stay"),
    "backslash": (renamed(b"demo\\noise.bin"), "would not stay"),
    "drive": (renamed(b"C:mo/noise.bin"), "would not stay"),
    "control character": (renamed(b"demo/noi\x1be.bin"), "would not stay"),
    "NUL": (renamed(b"demo/noi\x00e.bin"), "would not stay"),
    "empty part": (renamed(b"demo//oise.bin"), "would not stay"),
    "hidden file": (GOOD.replace(b"demo/ext.abi3.so", b"demo/ext.abi3.xx"), "its RECORD lists demo/ext.abi3.so"),
    "other hash in RECORD": (wheel({"demo/ext.abi3.so": EXTENSION + b"!"}), "the hash that its RECORD says"),
    "RECORD with a field of kilobytes": (
        wheel(record=b"demo/" + b"x" * 200_000), "its RECORD is no table"
    ),
    "other metadata": (wheel(metadata=METADATA.replace("demo", "else")), "its metadata says else 1.2, not demo 1.2"),
    "metadata without version": (wheel(metadata="Name: demo\n"), "not what it is called"),
    "two metadata": (wheel({"other-1.0.dist-info/METADATA": b""}), "2 of its members"),
    "metadata of megabytes": (wheel(metadata=METADATA + "X" * (9 << 20)), "more than 8388608"),
    "bomb": (bomb(80 << 20), "would inflate"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "says"), LIES.values(), ids=LIES)
def test_a_wheel_that_lies_ends_in_an_error(data, says, tmp_path):
    started = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(BringupError, match=says) as raised:
            facts_of(data, tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert FILE in str(raised.value)
    assert time.monotonic() - started < 5
    assert peak < 48 << 20


def test_a_bomb_that_claims_little_is_stopped_where_it_goes_beyond(tmp_path):
    """A member of 64 MB of zeros that claims 1,000 bytes: not one megabyte of it is kept."""
    packed = zlib.compressobj(9, zlib.DEFLATED, -15)
    zeros = packed.compress(bytes(64 << 20)) + packed.flush()
    name = b"demo/bomb.so"
    local = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 8, 0, 33, 0, len(zeros), 1000, len(name), 0) + name + zeros
    entry = struct.pack(
        "<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 8, 0, 33, 0, len(zeros), 1000, len(name), 0, 0, 0, 0, 0, 0
    ) + name  # fmt: skip
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, len(entry), len(local), 0)
    path = tmp_path / FILE
    path.write_bytes(local + entry + end)
    with open_local(path) as source:
        archive = Archive(source)
        tracemalloc.start()
        try:
            with pytest.raises(BringupError, match="inflates to more than the 1000 bytes it claims"):
                archive.fronts(archive.members, 1 << 20)[0].whole()
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()


def test_every_byte_of_a_wheel_may_be_wrong(tmp_path):
    """Damage to a wheel without noise, at every place: the same answer, or an error, never another answer."""
    expected = facts_of(SMALL, tmp_path).distribution
    others = []
    for position in range(len(SMALL)):
        data = bytearray(SMALL)
        data[position] ^= 0x41
        try:
            found = facts_of(bytes(data), tmp_path).distribution
        except (BringupError, InputError):
            continue
        if found != expected:
            others.append((position, found))
    assert others == []


def small() -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("demo/e.so"), EXTENSION, zipfile.ZIP_DEFLATED)
        archive.writestr(zipfile.ZipInfo("demo-1.2.dist-info/METADATA"), METADATA, zipfile.ZIP_DEFLATED)
        archive.writestr(zipfile.ZipInfo("demo-1.2.dist-info/RECORD"), record_line("demo/e.so", EXTENSION))
    return memory.getvalue()


SMALL = small()


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), max_size=8),
    st.integers(0, len(SMALL)) | st.none(),
    st.binary(max_size=40),
)
def test_a_mangled_wheel_is_an_error_or_the_same(tmp_path, changes, end, tail):
    data = bytearray(SMALL)
    for position, value in changes:
        data[position] = value
    try:
        found = facts_of(bytes(data[:end]) + tail, tmp_path).distribution
    except BringupError:
        return
    assert [file.undefined for file in found.files] == [frozenset(UNDEFINED)]


@pytest.mark.parametrize("large", [False, True], ids=["zip", "zip64"])
def test_large_file_records_are_read(large, tmp_path):
    """zipfile writes zip64 fields when forced to; a real wheel of 4 GB has the same."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in (
            ("demo/ext.abi3.so", EXTENSION),
            ("demo-1.2.dist-info/METADATA", METADATA.encode()),
            ("demo-1.2.dist-info/RECORD", b""),
        ):
            with archive.open(zipfile.ZipInfo(path), "w", force_zip64=large) as member:
                member.write(data)
    data = memory.getvalue()
    if large:
        data = as_zip64(data)
    facts = facts_of(data, tmp_path)
    assert facts.distribution.files[0].undefined == frozenset(UNDEFINED)


def as_zip64(data: bytes) -> bytes:
    """Return the same archive with every size and place in the fields for large files."""
    end = struct.unpack("<4s4H2LH", data[-22:])
    count, start = end[4], end[6]
    directory = b""
    for at in entries(data):
        entry = list(struct.unpack_from("<4s6H3L5H2L", data, at))
        name = data[at + 46 : at + 46 + entry[10]]
        extra = struct.pack("<HH3Q", 1, 24, entry[9], entry[8], entry[16])
        entry[8] = entry[9] = entry[16] = 0xFFFFFFFF
        entry[11], entry[12] = len(extra), 0
        directory += struct.pack("<4s6H3L5H2L", *entry) + name + extra
    place = start + len(directory)
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), start)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, place, 1)
    last = struct.pack("<4s4H2LH", b"PK\5\6", 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return data[:start] + directory + record + locator + last


def test_limits_hold_for_the_number_of_members(monkeypatch, tmp_path):
    monkeypatch.setattr(archive_module, "MAX_MEMBERS", 3)
    with pytest.raises(BringupError, match="claims 4 members"):
        facts_of(GOOD, tmp_path)


@pytest.mark.parametrize("name", ["demo.whl", "demo-1.2.tar.gz", "demo-x-py3-none-any.whl"])
def test_a_file_name_that_is_no_wheels(name, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(GOOD)
    with open_local(path) as source, pytest.raises(InputError, match="not a wheel"):
        read_wheel(source, name)


# --- indexes --------------------------------------------------------------------------------------------

HTML = """<!doctype html><html><head><base href="/files/"></head><body>
<a href="demo-1.0-py3-none-any.whl#sha256={digest}">demo 1.0</a>
<a href="demo-1.2-cp310-abi3-manylinux2014_x86_64.whl" data-requires-python="&gt;=3.10">demo 1.2</a>
<a href="demo-1.3-cp310-abi3-manylinux2014_aarch64.whl">for another machine</a>
<a href="demo-1.4-py3-none-any.whl" data-yanked="broken">withdrawn</a>
<a href="demo-2.0rc1-py3-none-any.whl">a pre-release</a>
<a href="demo-3.0-py3-none-any.whl" data-requires-python="&gt;=3.99">for a later Python</a>
<a href="demo-1.5.tar.gz">a source</a> <a href="demolition-9.0-py3-none-any.whl">another distribution</a>
</body></html>""".replace("{digest}", "ab" * 32)


def index_of(http, url: str) -> Indexes:
    return Indexes(http, Sources({}, DefaultIndex(Source(url))))


@pytest.fixture
def page(http):
    with serving(HTML.encode(), "no-ranges", name="") as served:
        yield served


@pytest.mark.parametrize(
    ("requirement", "file"),
    [
        ("demo", "demo-1.2-cp310-abi3-manylinux2014_x86_64.whl"),
        ("demo<1.2", "demo-1.0-py3-none-any.whl"),
        ("demo==1.4", "demo-1.4-py3-none-any.whl"),
        ("Demo==1.2", "demo-1.2-cp310-abi3-manylinux2014_x86_64.whl"),
        ("demo==2.0rc1", "demo-2.0rc1-py3-none-any.whl"),
    ],
)
def test_the_newest_wheel_that_fits_is_chosen(http, page, requirement, file):
    offer = index_of(http, page.url).find(requirement, "cp312-x86_64")
    assert offer.file == file
    assert offer.url.endswith("/files/" + file)


@pytest.mark.parametrize(
    ("requirement", "says"),
    [
        ("demo==9", "no wheel of demo==9 for cp312-x86_64"),
        ("demo==1.3", "no wheel of demo==1.3 for cp312-x86_64"),
        ("demo==3.0", "no wheel of demo==3.0"),
        ("absent", "no index has a wheel of absent"),
        ("demo=1", "neither a wheel nor a requirement"),
    ],
)
def test_a_requirement_without_a_wheel(http, page, requirement, says):
    with pytest.raises(InputError, match=says):
        index_of(http, page.url).find(requirement, "cp312-x86_64")


@pytest.mark.parametrize("is_beside", [True, False], ids=["on the index's server", "on another server"])
def test_the_login_of_an_index_goes_to_its_own_server_only(is_beside):
    with serving(GOOD, name=FILE) as elsewhere, serving(GOOD, "locked-index", name="") as served:
        served.listed = f"/files/{FILE}" if is_beside else elsewhere.url
        sources = Sources({}, DefaultIndex(Source(served.url, *LOGIN)))
        with reader(sources) as wheels:
            assert wheels.read("demo", "cp312-x86_64").distribution.version == "1.2"
    assert None not in served.logins
    assert set(elsewhere.logins) == (set() if is_beside else {None})


def test_a_login_in_an_address_is_used_and_never_said():
    with serving(GOOD, "locked", name=FILE) as served, reader(Sources({}, DefaultIndex())) as wheels:
        address = served.url.replace("://", f"://{LOGIN[0]}:{LOGIN[1]}@")
        assert wheels.read(address, "cp312-x86_64").distribution.name == "demo"
        with pytest.raises(BringupError) as raised:
            wheels.read(address.replace(LOGIN[1], "wrong-one"), "cp312-x86_64")
    assert "wrong-one" not in str(raised.value)


PAGE = {
    "meta": {"api-version": "1.1"},
    "files": [
        {"filename": FILE, "url": f"../files/{FILE}", "hashes": {"sha256": "ab" * 32}, "size": 77, "yanked": False},
        {"filename": "demo-1.3-py3-none-any.whl", "url": "b", "hashes": {}, "size": "77", "yanked": "broken"},
        {"filename": "demo-1.1.tar.gz", "url": "c", "hashes": {}},
    ],
}


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        pytest.param(PAGE, (FILE, "ab" * 32, 77), id="page"),
        pytest.param({"files": "x"}, "is no page of an index", id="files are no list"),
        pytest.param({"files": [{"filename": FILE}]}, "is no page of an index", id="no address"),
        pytest.param([], "is no page of an index", id="no object"),
    ],
)
def test_pages_in_json(http, page, expected):
    with serving(json.dumps(page).encode(), "json-page", name="") as served:
        if isinstance(expected, str):
            with pytest.raises(BringupError, match=expected):
                index_of(http, served.url).find("demo", "cp312-x86_64")
            return
        offer = index_of(http, served.url).find("demo", "cp312-x86_64")
    assert (offer.file, offer.sha256, offer.size_bytes) == expected
    assert offer.url == served.url + "files/" + FILE


@pytest.mark.parametrize("manner", ["failing", "locked", "hanging-up"])
def test_an_index_that_cannot_be_read_is_an_error_and_not_an_absence(http, manner):
    with serving(b"", manner) as served, pytest.raises(BringupError, match="cannot read"):
        index_of(http, served.url).find("demo", "cp312-x86_64")


def test_directories_of_wheels_and_file_indexes(http, tmp_path):
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / FILE).write_bytes(GOOD)
    place = tmp_path / "simple" / "demo"
    place.mkdir(parents=True)
    (place / "index.html").write_text('<a href="demo-1.1-py3-none-any.whl">x</a>')
    sources = Sources({}, DefaultIndex(Source((tmp_path / "simple").as_uri()), links=(str(tmp_path / "links"),)))
    found = Indexes(http, sources).versions("demo", "cp312-x86_64")
    assert {str(version): offer.url for version, offer in found.items()} == {
        "1.1": (place / "demo-1.1-py3-none-any.whl").as_uri(),
        "1.2": (tmp_path / "links" / FILE).as_uri(),
    }
    with reader(sources) as wheels:
        facts = wheels.read("demo==1.2", "cp312-x86_64")
    assert (facts.fetched_bytes, facts.distribution.version) == (0, "1.2")


@pytest.mark.parametrize(
    ("what", "error", "says"),
    [("missing-1.0-py3-none-any.whl", InputError, "no wheel missing-1.0"), ("x.whl", InputError, "no wheel x.whl")],
)
def test_a_path_that_leads_nowhere(what, error, says):
    with reader(Sources({}, DefaultIndex())) as wheels, pytest.raises(error, match=says):
        wheels.read(what, "cp312-x86_64")
