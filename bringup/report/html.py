"""Draw results as one HTML page: no script, nothing loaded from elsewhere, everything from hosts escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from bringup import __version__
from bringup.report import text
from bringup.report.records import RolloutResults
from bringup.report.results import Results

# Statuses in the order in which people want to read about them.
_ORDER = ("failed", "refused", "unknown", "slow", "drift", "ok")


def render(
    results: Results,
    *,
    written_s: float,
    seen_s: Mapping[str, float] | None = None,
    rollouts: Sequence[RolloutResults] = (),
) -> str:
    """Return the page of a run, or of a fleet whose hosts were seen at different times (``seen_s``).

    ``written_s`` and ``seen_s`` are seconds since the Unix epoch.
    """
    return _template().render(
        results=results,
        hosts=sorted(results.hosts.items(), key=lambda item: _ORDER.index(item[1].status)),
        order=_ORDER,
        written=text.when(written_s),
        seen={name: text.when(time_s) for name, time_s in (seen_s or {}).items()},
        rollouts=rollouts,
        version=__version__,
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("bringup.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_finalize,
    )
    environment.filters |= {"shown": text.shown, "when": text.when, "size": text.size}
    environment.globals["measured"] = text.measured
    return environment.get_template("page.html.j2")


def _finalize(value: object) -> object:
    # Text from a host may hold characters that a browser would obey; everything that is printed passes here.
    return text.printable(value) if type(value) is str else value
