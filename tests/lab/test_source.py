"""Which mirror the base image comes from: read from what apt prints, here in captured form with other names."""

from __future__ import annotations

from pathlib import Path

import pytest

from bringup.errors import LabError
from bringup.lab import source


def target(**fields: str) -> str:
    return "\n".join(f"{key.replace('_', '-')}: {value}" for key, value in fields.items())


DEBIAN = {
    "Created_By": "Packages",
    "Codename": "bookworm",
    "Suite": "oldstable",
    "Origin": "Debian",
    "Component": "main",
    "Architecture": "amd64",
    "Repo_URI": "http://mirror.example/debian/",
}
UBUNTU = dict(DEBIAN, Codename="noble", Suite="noble", Origin="Ubuntu", Repo_URI="http://mirror.example/ubuntu/")
SETTINGS = "APT::Architecture\tamd64\nAPT::Update\t\n"


@pytest.mark.parametrize(
    ("targets", "settings", "codename", "distribution", "wanted"),
    [
        pytest.param(
            [DEBIAN, dict(DEBIAN, Suite="oldstable-updates", Codename="bookworm-updates")],
            SETTINGS,
            "bookworm",
            "debian",
            ("http://mirror.example/debian/", ("main",), None, None),
            id="Debian: the suite has another name than the release",
        ),
        pytest.param(
            [
                dict(UBUNTU, Suite="noble-security", Repo_URI="http://security.example/ubuntu/"),
                UBUNTU,
                dict(UBUNTU, Component="universe"),
            ],
            SETTINGS,
            "noble",
            "ubuntu",
            ("http://mirror.example/ubuntu/", ("main", "universe"), None, None),
            id="Ubuntu: pockets share the codename",
        ),
        pytest.param(
            [dict(DEBIAN, Origin="Docker", Repo_URI="http://third.example/"), DEBIAN],
            SETTINGS,
            "bookworm",
            "debian",
            ("http://mirror.example/debian/", ("main",), None, None),
            id="a third party for the same release",
        ),
        pytest.param(
            [dict(DEBIAN, Signed_By="/usr/share/keyrings/site.gpg"), dict(DEBIAN, Created_By="Sources")],
            SETTINGS + "Acquire::http::Proxy\thttp://proxy.example:3128\n",
            "bookworm",
            "debian",
            (
                "http://mirror.example/debian/",
                ("main",),
                Path("/usr/share/keyrings/site.gpg"),
                "http://proxy.example:3128",
            ),
            id="a key and a proxy of the site",
        ),
    ],
)
def test_the_release_itself_is_chosen(
    targets: list[dict[str, str]],
    settings: str,
    codename: str,
    distribution: str,
    wanted: tuple[str, tuple[str, ...], Path | None, str | None],
) -> None:
    text = "\n\n".join(target(**fields) for fields in targets)
    found = source.choose(text, settings, codename=codename, distribution=distribution)
    assert (found.uri, found.components, found.keyring, found.proxy) == wanted


def test_a_list_of_mirrors_gives_its_first(tmp_path: Path) -> None:
    (tmp_path / "mirrors.list").write_text("# nearest first\n\nhttp://near.example/debian\tpriority:1\n")
    text = target(**dict(DEBIAN, Repo_URI=f"mirror+file:{tmp_path}/mirrors.list/"))
    found = source.choose(text, SETTINGS, codename="bookworm", distribution="debian")
    assert found.uri == "http://near.example/debian"


def test_without_an_index_apt_must_be_updated() -> None:
    with pytest.raises(LabError, match="apt knows no index of debian trixie") as caught:
        source.choose(target(**DEBIAN), SETTINGS, codename="trixie", distribution="debian")
    assert "apt-get update" in (caught.value.hint or "")
