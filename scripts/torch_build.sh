#!/usr/bin/env bash
# Prints the package index with the PyTorch for this machine, "" if it is pip's own; run as scripts/torch_build.sh [PYTHON].
# PyPI's PyTorch is for CUDA 13, of gigabytes. CUDA 13 needs driver 580 and has no kernels for GPUs before Turing (compute
# capability 7.5); CUDA 12.6 has none for Blackwell (10.0 and newer): the table of PyTorch's RELEASE.md for 2.12 (pytorch
# pull request 182849).
set -euo pipefail

torch_build() {
    local gpus driver capability build=""
    # An old nvidia-smi does not know compute_cap and fails.
    gpus=$(nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null) ||
        gpus=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || gpus=""
    [ -n "$gpus" ] || build=cpu
    while IFS=', ' read -r driver capability; do
        [[ "$driver" =~ ^[0-9]+\. ]] || continue # a warning
        driver="${driver%%.*}"
        [[ "$capability" =~ ^[0-9]+\.[0-9]$ ]] || capability=8.0 # unknown: a GPU that every build has kernels for
        capability="${capability/./}"
        if ((driver < 580 && capability >= 100)); then
            build=none
        elif ((driver < 580 || capability < 75)); then
            build=cu126
        fi
    done <<<"$gpus"
    echo "$build"
}

if [ -n "${PIP_EXTRA_INDEX_URL:-}" ]; then
    echo "$PIP_EXTRA_INDEX_URL"
    exit
fi
python="${1:-python3}"
build="$(torch_build)"
index="https://download.pytorch.org/whl/$build"
answers='import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=10)'
if [ -z "$build" ] || [ "$(uname -s)" != Linux ] || [[ "$("$python" -m pip config list)" == *extra-index-url* ]]; then
    exit
elif [ "$build" = none ]; then
    echo "PyTorch has no build for this GPU (Blackwell) with an NVIDIA driver before 580: update the driver." >&2
    exit 2
elif "$python" -c "$answers" "$index/torch/" 2>/dev/null; then
    echo "PyTorch for $build, from $index. For another build, set PIP_EXTRA_INDEX_URL (docs/installation.md)." >&2
    echo "$index"
else
    echo "$index does not answer, so PyTorch for CUDA 13 (gigabytes) comes from pip's index." \
        "To get PyTorch for $build from a mirror, set PIP_FIND_LINKS (docs/installation.md)." >&2
fi
