"""Compare the index of torch exports with another reading of the same wheels, name for name.

Usage: abi_index.py OTHER.json.xz

OTHER is {"versions": [...], "libs": {library: {mask: [names]}}, "meta": {version: {"full", "cuda", "wheel",
"wheel_size"}}}, where bit i of a mask stands for the i-th version. Exit status: 0 equal, 1 not.
"""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path

from bringup import torch_index
from bringup.abi import TorchIndex


def main(path: str) -> int:
    other = json.loads(lzma.decompress(Path(path).read_bytes()))
    index = TorchIndex(torch_index.known_builds())
    differences = 0
    for number, version in enumerate(other["versions"]):
        build = index.get(version)
        if build is None:
            print(f"{version}: not in the index")
            differences += 1
            continue
        wanted: dict[str, set[str]] = {}
        for library, groups in other["libs"].items():
            names = {name for mask, found in groups.items() if int(mask) >> number & 1 for name in found}
            # The other reading has torch/_C.so too, which no extension can need.
            if names and library.startswith("lib"):
                wanted[library] = names
        about = other["meta"][version]
        wrong = [
            key
            for key, found in (
                ("full", build.version),
                ("cuda", build.cuda),
                ("wheel", build.file),
                ("wheel_size", build.size_bytes),
            )
            if about[key] != found
        ]
        found = {library: set(names) for library, names in build.exports.items() if names}
        unequal = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
        differences += len(wrong) + len(unequal)
        print(
            f"{build.version}: {sum(map(len, found.values()))} names in {len(found)} libraries, "
            f"{'equal' if not unequal else 'unequal in ' + ', '.join(unequal)}"
            + (f"; other {', '.join(wrong)}" if wrong else "")
        )
    return 1 if differences else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
