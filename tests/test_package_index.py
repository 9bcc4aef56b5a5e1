# ruff: noqa: E501 (a row of a table stays one line)
"""What the controller's own pip and uv say about their default index."""

from __future__ import annotations

from pathlib import Path

import pytest

from bringup.errors import InputError
from bringup.package_index import DefaultIndex, Source, Sources, credentials, default_index
from bringup.stack import Index


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def home(tmp_path: Path, **variables: str) -> dict[str, str]:
    """Return an environment whose only configuration files are those below ``tmp_path``."""
    return {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path / "xdg"), **variables}


# Files of the machine that runs the tests (/etc/pip.conf) count as well, so each case sets what it looks at.
CASES = [
    pytest.param(
        {"UV_DEFAULT_INDEX": "https://uv/simple/", "PIP_INDEX_URL": "https://pip/simple"}, {},
        DefaultIndex(Source("https://uv/simple"), origin="uv's environment variables"),
        id="uv's variable wins over pip's",
    ),
    pytest.param(
        {"UV_INDEX": "one=https://one/simple https://two/simple"}, {},
        DefaultIndex(extra=(Source("https://one/simple"), Source("https://two/simple")), origin="uv's environment variables"),
        id="named and unnamed entries of UV_INDEX",
    ),
    pytest.param(
        {}, {".config/uv/uv.toml": '[[index]]\nurl = "https://a/simple"\ndefault = true\n[[index]]\nurl = "https://b/simple"\n[[index]]\nurl = "https://c"\nexplicit = true\n'},
        DefaultIndex(Source("https://a/simple"), (Source("https://b/simple"),), origin="HOME/.config/uv/uv.toml"),
        id="uv.toml: an explicit index is no source for the rest",
    ),
    pytest.param(
        {}, {".config/uv/uv.toml": '[pip]\nindex-url = "https://u:p%40s@a/simple"\nfind-links = ["/wheels"]\n'},
        DefaultIndex(Source("https://a/simple", "u", "p@s"), links=("/wheels",), origin="HOME/.config/uv/uv.toml"),
        id="uv.toml: pip table, credentials taken out of the address",
    ),
    pytest.param(
        {"PIP_INDEX_URL": "https://pip/simple", "PIP_EXTRA_INDEX_URL": "https://e1/simple https://e2/simple", "PIP_FIND_LINKS": "/w1 /w2", "PIP_CERT": "/ca.pem", "PIP_CONFIG_FILE": "/dev/null"}, {},
        DefaultIndex(Source("https://pip/simple"), (Source("https://e1/simple"), Source("https://e2/simple")), ("/w1", "/w2"), "/ca.pem", "pip's environment variables"),
        id="pip's variables",
    ),
    pytest.param(
        {"PIP_CONFIG_FILE": "HOME/named.conf", "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""},
        {"named.conf": "[global]\nindex-url = https://g/simple\ncert = /g.pem\n[install]\nindex-url = https://i/simple?a=%20b\n"},
        DefaultIndex(Source("https://i/simple?a=%20b"), certificate="/g.pem"),
        id="pip.conf: the install section wins, percent signs are literal",
    ),
    pytest.param(
        {"PIP_CONFIG_FILE": "HOME/named.conf", "PIP_INDEX_URL": "https://v/simple", "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""},
        {"named.conf": "[global]\nindex-url = https://g/simple\n"},
        DefaultIndex(Source("https://v/simple")),
        id="pip: a variable replaces the same key of a file",
    ),
    pytest.param({"PIP_CONFIG_FILE": "/dev/null"}, {}, DefaultIndex(), id="nothing configured"),
]  # fmt: skip


@pytest.mark.parametrize(("variables", "files", "wanted"), CASES)
def test_default_index(tmp_path: Path, variables: dict[str, str], files: dict[str, str], wanted: DefaultIndex) -> None:
    for name, text in files.items():
        write(tmp_path / name, text)
    here = {key: value.replace("HOME", str(tmp_path)) for key, value in variables.items()}
    found = default_index(home(tmp_path, **here))
    assert (found.url, found.extra, found.links) == (wanted.url, wanted.extra, wanted.links)
    if wanted.certificate:
        assert found.certificate == wanted.certificate
    if wanted.origin != "built in":
        assert found.origin == wanted.origin.replace("HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "variables", "text"),
    [
        pytest.param(".config/uv/uv.toml", {}, "index = ", id="uv"),
        pytest.param("pip.conf", {"PIP_CONFIG_FILE": "HOME/pip.conf"}, "no section\n", id="pip"),
    ],
)
def test_file_that_cannot_be_parsed_is_named(tmp_path: Path, name: str, variables: dict[str, str], text: str) -> None:
    path = write(tmp_path / name, text)
    here = {key: value.replace("HOME", str(tmp_path)) for key, value in variables.items()}
    with pytest.raises(InputError) as raised:
        default_index(home(tmp_path, **here))
    assert raised.value.what == f"cannot read {path}"


@pytest.mark.parametrize(
    ("reference", "wanted"),
    [
        pytest.param(None, None, id="none"),
        pytest.param("env:LOGIN", ("me", "a:b"), id="variable; the password may hold a colon"),
        pytest.param("env:TOKEN", ("__token__", "secret"), id="bare token"),
        pytest.param("file:PATH", ("me", "pw"), id="file"),
    ],
)
def test_credentials(tmp_path: Path, reference: str | None, wanted: tuple[str, str] | None) -> None:
    path = write(tmp_path / "login", "me:pw\n")
    found = credentials(
        reference.replace("PATH", str(path)) if reference else None, {"LOGIN": "me:a:b", "TOKEN": "secret"}
    )
    assert found == wanted


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        pytest.param("env:ABSENT", "the variable is not set", id="variable"),
        pytest.param("file:/nowhere", "the file cannot be read or is empty", id="file"),
    ],
)
def test_missing_credentials_are_named_by_reference(reference: str, why: str) -> None:
    with pytest.raises(InputError) as raised:
        credentials(reference, {})
    assert (raised.value.what, raised.value.why) == (f"no credentials behind {reference}", why)


def test_login_belongs_to_its_server_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGIN", "me:pw")
    index = Index(name="site", url="https://wheels.example/simple", credentials="env:LOGIN")
    sources = Sources.of([index], DefaultIndex())
    assert sources.named["site"] == Source("https://wheels.example/simple", "me", "pw")
    assert sources.login("https://wheels.example/files/a.whl") == ("me", "pw")
    assert sources.login("https://other.example/files/a.whl") is None
    assert sources.login("http://wheels.example/files/a.whl") is None
