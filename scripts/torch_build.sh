# Sourced by environment.sh: exports PIP_EXTRA_INDEX_URL where PyPI's PyTorch, for CUDA 13 and of gigabytes, does not fit.
# CUDA 13 needs driver 580 and has no kernels for GPUs before Turing (compute capability 7.5); CUDA 12.6 has none for
# Blackwell (10.0 and newer): the table of PyTorch's RELEASE.md for 2.12 (pytorch pull request 182849).
torch_build() {
    local gpus driver capability build=""
    # An old nvidia-smi does not know compute_cap and fails.
    gpus=$(nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null) ||
        gpus=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || gpus=""
    [ -n "$gpus" ] || build=cpu
    while IFS=', ' read -r driver capability; do
        [[ "$driver $capability" =~ ^([0-9]+)\.[0-9.]*\ ([0-9]+)\.([0-9])$ ]] ||
            [[ "$driver 8.0" =~ ^([0-9]+)\.[0-9.]*\ ([0-9]+)\.([0-9])$ ]] || continue
        if ((BASH_REMATCH[1] < 580 && BASH_REMATCH[2] >= 10)); then
            build=none
        elif ((BASH_REMATCH[1] < 580 || BASH_REMATCH[2] * 10 + BASH_REMATCH[3] < 75)); then
            build=cu126
        fi
    done <<<"$gpus"
    echo "$build"
}

if [ "$(uname -s)" = Linux ] && [ -z "${PIP_EXTRA_INDEX_URL:-}" ] &&
    ! "$venv/bin/python" -m pip config list | grep -q extra-index-url; then
    build="$(torch_build)"
    index="https://download.pytorch.org/whl/$build"
    answers='import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=10)'
    if [ "$build" = none ]; then
        echo "PyTorch has no build for this GPU (Blackwell) with an NVIDIA driver before 580: update the driver." >&2
        exit 2
    elif [ -n "$build" ] && "$venv/bin/python" -c "$answers" "$index/torch/" 2>/dev/null; then
        export PIP_EXTRA_INDEX_URL="$index"
        echo "PyTorch for $build, from $index. For another build, set PIP_EXTRA_INDEX_URL (docs/installation.md)."
    elif [ -n "$build" ]; then
        echo "$index does not answer, so PyTorch for CUDA 13 (gigabytes) comes from pip's index." \
            "To get PyTorch for $build from a mirror, set PIP_FIND_LINKS (docs/installation.md)."
    fi
fi
