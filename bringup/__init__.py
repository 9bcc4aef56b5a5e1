"""Take bare GPU servers to a verified CUDA 13 inference stack and keep them there."""

__version__ = "0.1.0"
