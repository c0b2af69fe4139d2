# Sourced by quickstart and test: makes or reuses the environment; `stage` runs and times a step, `summary` lists them.
# TOOLKIT_VENV=DIR       the environment; .venv if it is not given
# TOOLKIT_NO_INSTALL=1   installs nothing: environment_as_it_is.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${TOOLKIT_VENV:-$PWD/.venv}"
summary=""

stage() {
    local name=$1 started=$SECONDS
    shift
    echo "== $name: $*"
    "$@"
    echo "== $name: done in $((SECONDS - started)) s"
    summary="$summary${summary:+, }$name $((SECONDS - started)) s"
}

find_python() {
    local name
    for name in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.10; do
        if [ -n "$name" ] && "$name" -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "Python 3.10 or newer (with venv) is needed and was not found. Debian: apt install python3 python3-venv. Or set PYTHON." >&2
    exit 2
}

if [ -n "${TOOLKIT_NO_INSTALL:-}" ]; then
    source scripts/environment_as_it_is.sh
    return
fi

# The stamp names what was installed, so that a changed pyproject.toml or constraints.txt installs again.
stamp="$(cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)-$extras"
if [ ! -f "$venv/.installed-$stamp" ]; then
    free_gb=$(df -Pk "$(dirname "$venv")" | awk 'NR == 2 { print int($4 / 1000000) }')
    [ "$free_gb" -ge 2 ] || { echo "$venv needs 2 GB of disk, 8 with PyTorch for CUDA; $free_gb GB are free." >&2 && exit 2; }
    if [ ! -x "$venv/bin/python" ]; then
        python="$(find_python)"
        stage venv "$python" -m venv "$venv"
    fi
    # pip compiles to bytecode on one core; all of them do it below.
    pip_install=("$venv/bin/python" -m pip install --disable-pip-version-check --no-compile)
    [ -t 1 ] || pip_install+=(--quiet) # on a terminal pip shows its progress bars
    export PIP_EXTRA_INDEX_URL; PIP_EXTRA_INDEX_URL="$(scripts/torch_build.sh "$venv/bin/python")"
    # torch first and pinned, so that nothing else can pull in another build of several gigabytes.
    stage torch "${pip_install[@]}" "$(grep '^torch==' constraints.txt)"
    stage packages "${pip_install[@]}" -c constraints.txt -e ".$extras"
    stage bytecode "$venv/bin/python" -W ignore -m compileall -qq -j 0 "$venv/lib" || true # some are of other Pythons
    touch "$venv/.installed-$stamp"
else
    echo "== environment: $venv is up to date"
fi

export PATH="$venv/bin:$PATH"
export VIRTUAL_ENV="$venv"
# Compiled ops belong to this environment: a lock that a killed build left elsewhere cannot stop us.
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$venv/torch_extensions}"
