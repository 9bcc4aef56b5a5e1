"""Read a wheel by requirement, address or path, with the controller's own indexes and credentials."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx

from bringup.errors import InputError
from bringup.locking import http as web
from bringup.package_index import Source, Sources
from bringup.wheels.listing import Indexes, Offer
from bringup.wheels.reading import WheelFacts, read_wheel
from bringup.wheels.remote import Source as Bytes
from bringup.wheels.remote import open_local, open_source


class WheelReader:
    """Open wheels on indexes, behind addresses and on this machine. Use `reader`."""

    def __init__(self, http: httpx.Client, sources: Sources, say: Callable[[str], None]) -> None:
        self.http = http
        self.sources = sources
        self.indexes = Indexes(http, sources)
        self._say = say

    def read(self, what: str, platform: str) -> WheelFacts:
        """Return what a wheel needs and offers: a path or address ending in .whl, or a requirement.

        ``platform`` such as ``cp312-x86_64`` chooses among an index's wheels. Raises InputError when there is
        no such wheel, BringupError when it cannot be read.
        """
        with self.opened(what, platform) as (source, file):
            return read_wheel(source, file)

    def read_offer(self, offer: Offer) -> WheelFacts:
        """Return what a wheel of an index needs and offers; raises BringupError."""
        with self.open_offer(offer) as source:
            return read_wheel(source, offer.file)

    @contextmanager
    def open_offer(self, offer: Offer, *, whole: bool = False) -> Iterator[Bytes]:
        """Open a wheel of an index; ``whole`` fetches all of it at once and tests its hash."""
        with open_source(
            self.http,
            offer.url,
            login=offer.login or self.sources.login(offer.url),
            size_bytes=offer.size_bytes,
            sha256=offer.sha256,
            whole=whole,
            say=self._say,
        ) as source:
            yield source

    @contextmanager
    def opened(self, what: str, platform: str) -> Iterator[tuple[Bytes, str]]:
        """Open a wheel by path, address or requirement; yields it with its file name."""
        if not what.endswith(".whl"):
            offer = self.indexes.find(what, platform)
            with self.open_offer(offer) as source:
                yield source, offer.file
        elif urlsplit(what).scheme in ("http", "https", "file"):
            # A login in the address must not come back in a message.
            at = Source.parse(what)
            login = self.sources.login(at.url) if at.user is None else (at.user, at.password or "")
            file = unquote(urlsplit(at.url).path.rsplit("/", 1)[-1])
            with open_source(self.http, at.url, login=login, say=self._say) as source:
                yield source, file
        else:
            path = Path(what)
            if not path.is_file():
                raise InputError(f"no wheel {what}", hint="name a file, an address or a requirement such as NAME==1.2")
            with open_local(path) as source:
                yield source, path.name


@contextmanager
def reader(sources: Sources, say: Callable[[str], None] = lambda _: None) -> Iterator[WheelReader]:
    """Open a reader over indexes; ``say`` hears what takes long."""
    with web.client(sources.default.certificate, direct=sources.direct) as http:
        yield WheelReader(http, sources, say)
