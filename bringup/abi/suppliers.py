"""Who supplies a library: hints for a remedy, never a verdict.

Names as NVIDIA's wheels and Debian's and Ubuntu's packages bear them by convention, written down 2026-11; those of
packages that no test installs were not compared with the distributions' own lists.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Supplier:
    """Tell where libraries of a name pattern come from; ``is_cuda`` when torch's CUDA wheels bring them."""

    pattern: str
    pip: str | None = None
    apt: str | None = None
    is_cuda: bool = False


SUPPLIERS: tuple[Supplier, ...] = (
    Supplier("libcudart.so.12", pip="nvidia-cuda-runtime-cu12", is_cuda=True),
    Supplier("libcudart.so.*", pip="nvidia-cuda-runtime", is_cuda=True),
    Supplier("libcublas*.so.12", pip="nvidia-cublas-cu12", is_cuda=True),
    Supplier("libcublas*.so.*", pip="nvidia-cublas", is_cuda=True),
    Supplier("libnvblas.so.12", pip="nvidia-cublas-cu12", is_cuda=True),
    Supplier("libnvrtc*.so.12*", pip="nvidia-cuda-nvrtc-cu12", is_cuda=True),
    Supplier("libnvrtc*.so.*", pip="nvidia-cuda-nvrtc", is_cuda=True),
    Supplier("libnvJitLink.so.12", pip="nvidia-nvjitlink-cu12", is_cuda=True),
    Supplier("libnvJitLink.so.*", pip="nvidia-nvjitlink", is_cuda=True),
    Supplier("libcufft*.so.11", pip="nvidia-cufft-cu12", is_cuda=True),
    Supplier("libcufft*.so.*", pip="nvidia-cufft", is_cuda=True),
    Supplier("libcurand.so.*", pip="nvidia-curand", is_cuda=True),
    Supplier("libcusolver*.so.11", pip="nvidia-cusolver-cu12", is_cuda=True),
    Supplier("libcusolver*.so.*", pip="nvidia-cusolver", is_cuda=True),
    Supplier("libcusparseLt.so.*", pip="nvidia-cusparselt-cu13", is_cuda=True),
    Supplier("libcusparse.so.*", pip="nvidia-cusparse", is_cuda=True),
    Supplier("libcudnn*.so.9", pip="nvidia-cudnn-cu13", is_cuda=True),
    Supplier("libcufile*.so.*", pip="nvidia-cufile", is_cuda=True),
    Supplier("libcupti.so.12", pip="nvidia-cuda-cupti-cu12", is_cuda=True),
    Supplier("libcupti.so.*", pip="nvidia-cuda-cupti", is_cuda=True),
    Supplier("libnccl.so.2", pip="nvidia-nccl-cu13", is_cuda=True),
    Supplier("libnvshmem_host.so.*", pip="nvidia-nvshmem-cu13", is_cuda=True),
    Supplier("libnvToolsExt.so.1", pip="nvidia-nvtx-cu12", is_cuda=True),
    Supplier("libnpp*.so.12", pip="nvidia-npp-cu12", is_cuda=True),
    Supplier("libnpp*.so.*", pip="nvidia-npp", is_cuda=True),
    Supplier("libnvjpeg.so.12", pip="nvidia-nvjpeg-cu12", is_cuda=True),
    Supplier("libnvjpeg.so.*", pip="nvidia-nvjpeg", is_cuda=True),
    Supplier("libcuda.so.1", apt="libcuda1 (the NVIDIA driver)"),
    Supplier("libnvidia-ml.so.1", apt="libnvidia-ml1 (the NVIDIA driver)"),
    Supplier("libnvcuvid.so.1", apt="libnvcuvid1 (the NVIDIA driver)"),
    Supplier("libnuma.so.1", apt="libnuma1"),
    Supplier("libibverbs.so.1", apt="libibverbs1"),
    Supplier("librdmacm.so.1", apt="librdmacm1"),
    Supplier("libmlx5.so.1", apt="ibverbs-providers"),
    Supplier("libgomp.so.1", apt="libgomp1"),
    Supplier("libstdc++.so.6", apt="libstdc++6"),
    Supplier("libgcc_s.so.1", apt="libgcc-s1"),
    Supplier("libmpi.so.40", apt="libopenmpi3"),
    Supplier("libfabric.so.1", apt="libfabric1"),
    Supplier("libuc[ps].so.0", apt="libucx0"),
    Supplier("libpmix.so.2", apt="libpmix2"),
    Supplier("libGL.so.1", apt="libgl1"),
    Supplier("libav*.so.*", apt="ffmpeg"),
    Supplier("libsw*.so.*", apt="ffmpeg"),
    Supplier("libtbb.so.12", apt="libtbb12"),
    Supplier("libtvm_ffi.so", pip="apache-tvm-ffi"),
    Supplier("libtorch*.so", pip="torch"),
    Supplier("libc10*.so", pip="torch"),
)


@lru_cache(maxsize=1024)
def supplier(library: str) -> Supplier | None:
    """Return who supplies a library, None when the table does not know it."""
    return next((row for row in SUPPLIERS if fnmatch.fnmatchcase(library, row.pattern)), None)
