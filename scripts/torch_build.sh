# Sourced by environment.sh: exports PIP_EXTRA_INDEX_URL where PyPI's PyTorch, for CUDA 13 and of gigabytes, does not fit:
# without a GPU, or with an NVIDIA driver before 580. An index that pip has been given already is left as it is.
torch_build() {
    local driver
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || driver=""
    if [ -z "$driver" ]; then
        echo cpu
    elif [ "${driver%%.*}" -lt 580 ]; then
        echo cu126
    fi
}

if [ "$(uname -s)" = Linux ] && [ -z "${PIP_EXTRA_INDEX_URL:-}${PIP_INDEX_URL:-}" ] &&
    ! "$venv/bin/python" -m pip config list | grep -q index-url; then
    build="$(torch_build)"
    index="https://download.pytorch.org/whl/$build"
    answers='import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=10)'
    if [ -n "$build" ] && "$venv/bin/python" -c "$answers" "$index/torch/" 2>/dev/null; then
        export PIP_EXTRA_INDEX_URL="$index"
        echo "PyTorch for $build, from $index. For another build, set PIP_EXTRA_INDEX_URL (docs/installation.md)."
    fi
fi
