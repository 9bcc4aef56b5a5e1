"""Serve small wheel indexes on the loopback, with the traps of the real ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from small_index import X86, Quiet, Site


@contextmanager
def served(directory: Path) -> Iterator[Site]:
    """Serve an empty site; uv keeps its cache beside it, so that no site sees another one's indexes."""
    root = directory / "site"
    root.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(root)))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UV_CACHE_DIR", str(directory / "uv-cache"))
        try:
            yield Site(root, f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def fill(site: Site) -> Site:
    """Give the site the shape of a CUDA 13 stack.

    pytorch lacks what torch also needs; sglang has an older copy of it; flashinfer-jit-cache is on an index of its
    own; the default index has the cu128 torch that a bare requirement would drag in.
    """
    for minor in (11, 12):
        tag = f"cp3{minor}-cp3{minor}-{X86}"
        site.add("pytorch", "torch", "2.9.1+cu130", "demo-runtime==13.0.96", "demo-jinja>=2", tag=tag)
    site.add("pytorch", "demo-runtime", "13.0.96", tag="py3-none-any", build="1")
    site.add("pytorch", "demo-runtime", "13.0.96", tag="py3-none-any", build="2")
    site.add("pytorch", "demo-jinja", "1.0")
    site.add("sglang", "sgl-kernel", "0.3.21+cu130", "demo-helper", tag=f"cp310-abi3-{X86}")
    site.add("sglang", "demo-helper", "0.9")
    site.add("flashinfer", "flashinfer-jit-cache", "0.6.4+cu130", tag=f"cp39-abi3-{X86}")
    site.add("default", "torch", "2.9.1", tag=f"cp311-cp311-{X86}")
    site.add("default", "demo-jinja", "2.0")
    site.add("default", "demo-jinja", "2.1")
    site.add("default", "demo-helper", "1.5")
    site.add("default", "flashinfer-python", "0.6.4", "torch", "demo-jinja")
    site.add("default", "flashinfer-python", "0.6.3", "torch", "demo-jinja")
    site.add(
        "default", "sglang", "0.5.9",
        "flashinfer-python==0.6.3", "flashinfer-jit-cache==0.6.3", "torch==2.9.1", "sgl-kernel==0.3.21",
    )  # fmt: skip
    return site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Serve an empty site for one test."""
    with served(tmp_path) as one:
        yield one


@pytest.fixture
def indexes(site: Site) -> Site:
    """Serve filled indexes that the test may change."""
    return fill(site)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Serve filled indexes to a whole module, which must leave them as they are."""
    with served(tmp_path_factory.mktemp("shared")) as one:
        yield fill(one)
