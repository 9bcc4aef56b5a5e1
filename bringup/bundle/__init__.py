"""Write everything that a stack needs into one directory that any static web server can serve to hosts."""

from bringup.bundle.check import Checked, Problem, check_bundle
from bringup.bundle.layout import Manifest, read_manifest
from bringup.bundle.signing import Signer, open_signer
from bringup.bundle.write import Order, Repositories, Written, write_bundle

__all__ = [
    "Checked",
    "Manifest",
    "Order",
    "Problem",
    "Repositories",
    "Signer",
    "Written",
    "check_bundle",
    "open_signer",
    "read_manifest",
    "write_bundle",
]
