# Sourced by quickstart and test: makes or reuses the environment, and says how long that took.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${TOOLKIT_VENV:-$PWD/.venv}"

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

if ! command -v c++ >/dev/null && ! command -v g++ >/dev/null; then
    echo "A C++ compiler is needed (DeepSpeed compiles its ops). Debian: apt install g++ python3-dev" >&2
    exit 2
fi

environment_started=$SECONDS
# The stamp names what was installed, so that a changed pyproject.toml or constraints.txt installs anew.
stamp="$(cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)-$extras"
if [ ! -f "$venv/.installed-$stamp" ]; then
    [ -x "$venv/bin/python" ] || "$(find_python)" -m venv "$venv"
    # torch first and pinned, so that nothing else can pull in another build of several gigabytes.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$(grep '^torch==' constraints.txt)"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".$extras"
    touch "$venv/.installed-$stamp"
fi
environment_s=$((SECONDS - environment_started))

export PATH="$venv/bin:$PATH"
export VIRTUAL_ENV="$venv"
# Compiled ops belong to this environment: a lock that a killed build left elsewhere cannot stop us.
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$venv/torch_extensions}"
