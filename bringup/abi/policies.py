"""Which of its shared objects a package cannot do without."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from packaging.utils import canonicalize_name


@dataclass(frozen=True)
class Variants:
    """Files of which a package uses one set.

    ``pattern`` has a group ``variant``. ``by`` is "capability" (the compute capability picks, by ``choice``
    with ``default``), "cuda" (the CUDA major or minor of torch picks), or "any" (the first set that loads).
    """

    pattern: str
    by: Literal["capability", "cuda", "any"] = "any"
    choice: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None

    def choose(self, names: Collection[str], cuda: str | None, capability: str | None) -> str | None:
        """Return the variant that the package takes, None when that cannot be told.

        ``cuda`` is torch's CUDA version ("12.8"), ``capability`` the GPU's compute capability ("9.0").
        """
        if self.by == "capability" and capability:
            digits = capability.replace(".", "")
            wanted = [self.choice.get(capability, self.default), digits]
        elif self.by == "cuda" and cuda:
            wanted = [cuda.replace(".", ""), cuda.split(".")[0]]
        else:
            return None
        return next((name for name in wanted if name in names), None)


@dataclass(frozen=True)
class Policy:
    """How a package treats its own shared objects; ``source`` says where that was read."""

    distributions: tuple[str, ...]
    source: str
    optional: tuple[str, ...] = ()
    variants: tuple[Variants, ...] = ()

    def survives_without(self, path: str) -> bool:
        """Return whether the package can be imported when a file of it does not load."""
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.optional)


# How packages that the table below does not know tend to name their variants.
_USUAL_VARIANTS = (
    Variants(r"(?:^|/)sm_?(?P<variant>\d+)[af]?/", by="capability"),
    Variants(r"[_-](?:cu|cuda)(?P<variant>\d{2,3})(?:[_.-]|$)", by="cuda"),
)

POLICIES: tuple[Policy, ...] = (
    Policy(
        ("sgl-kernel", "sglang-kernel"),
        source="sgl_kernel/load_utils.py of 0.3.21 and 0.4.10; flash_attn.py and others load theirs on use",
        optional=(
            "sgl_kernel/flash_ops.*",
            "sgl_kernel/flashmla_ops.*",
            "sgl_kernel/spatial_ops.*",
            "sgl_kernel/infllm_ops.*",
            "_mscclpp.*",
            "lib/*mscclpp*",
        ),
        variants=(
            Variants(
                r"^sgl_kernel/(?P<variant>sm\d+)/common_ops\.",
                by="capability",
                choice={"9.0": "sm90"},
                default="sm100",
            ),
        ),
    ),
    Policy(
        ("torchao",),
        source="torchao/__init__.py of 0.9.0 to 0.13.0 catches every error of loading its files",
        optional=("torchao/*",),
    ),
    Policy(
        ("torchvision",),
        source="torchvision/io/image.py of 0.24.1 warns and goes on without image.so",
        optional=("torchvision/image.*",),
    ),
    Policy(
        ("xformers",),
        source="xformers/ops/fmha/flash3.py of 0.0.34 goes on without its FlashAttention 3",
        optional=("xformers/flash_attn_3/*",),
    ),
    Policy(
        ("torchaudio",),
        source="torchaudio/models/decoder/_cuda_ctc_decoder.py of 2.11.0 loads it on use",
        optional=("torchaudio/lib/*prefixctc*", "torchaudio/lib/*ffmpeg*", "torchaudio/lib/*sox*"),
    ),
    Policy(
        ("torchcodec",),
        source="torchcodec/_core/ops.py of 0.8.0 tries one set of files after another, by FFmpeg major version",
        variants=(Variants(r"libtorchcodec_(?:core|custom_ops|pybind_ops|decoder)(?P<variant>\d+)\."),),
    ),
    Policy(
        ("torch-memory-saver",),
        source="torch_memory_saver/utils.py of 0.0.9.post1 picks by torch.version.cuda and leaves plain names alone",
        variants=(Variants(r"^torch_memory_saver_hook_mode_[a-z]+(?:_cu(?P<variant>\d+))?\.", by="cuda"),),
    ),
    Policy(
        ("bitsandbytes",),
        source="bitsandbytes/cextension.py picks libbitsandbytes_cudaNNN by torch.version.cuda, or the CPU one",
        variants=(Variants(r"libbitsandbytes_(?P<variant>cpu|cuda\d+|xpu|rocm\d+|hpu)\."),),
    ),
)

# Which torch minor a release without a declared torch was built for. Source: the compatibility table in
# torchcodec's README as of its 0.11 release; more than one torch has every name these need.
BUILT_FOR: Mapping[tuple[str, str], str] = {
    ("torchcodec", "0.7"): "2.8",
    ("torchcodec", "0.8"): "2.9",
    ("torchcodec", "0.9"): "2.9",
    ("torchcodec", "0.10"): "2.10",
    ("torchcodec", "0.11"): "2.11",
}


def policy_of(distribution: str) -> Policy:
    """Return how a package treats its shared objects; of one that the table does not know, nothing special."""
    name = canonicalize_name(distribution)
    return next((p for p in POLICIES if name in p.distributions), Policy((name,), source="no entry"))


def generic_variants(policy: Policy) -> tuple[Variants, ...]:
    """Return the usual namings of variants for a package whose own are not known."""
    return () if policy.variants else _USUAL_VARIANTS
