"""Where compiled kernels are kept between runs: in the Python environment, one folder for each set of versions.

Triton, inductor, DeepGEMM and others compile kernels at their first use, for seconds to minutes, and keep them in
folders for temporary files or in the home. A run's temporary folder is deleted with it, so they are kept elsewhere.
"""

import os
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from harness.runtime.files import is_own_folder

KEYED_BY = (
    "torch",
    "triton",
    "sglang",
    "sgl-kernel",
    "sglang-kernel",
    "flashinfer-python",
    "deep-gemm",
    "sgl-deep-gemm",
)
"""Packages whose versions name the folder."""
FOLDERS = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TILELANG_CACHE_DIR": "tilelang",
    "CUDA_CACHE_PATH": "cuda",
}


def variables(environment: Mapping[str, str], prefix: str = sys.prefix) -> dict[str, str]:
    """Return the variables that keep kernels in the environment at `prefix`; those that are set already are left out.

    Return nothing unless the environment is a folder of this user, which nobody else can write to: kernels are code.
    """
    if prefix == sys.base_prefix or not is_own_folder(Path(prefix)) or not os.access(prefix, os.W_OK):
        return {}
    versions = []
    for package in KEYED_BY:
        try:
            versions.append(f"{package}-{metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    folder = Path(prefix, "kernels", "_".join(versions))
    if any(os.path.lexists(made) and not is_own_folder(made) for made in (folder.parent, folder)):
        return {}
    return {name: str(folder / own) for name, own in FOLDERS.items() if name not in environment}
