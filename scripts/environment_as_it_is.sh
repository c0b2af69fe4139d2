# Sourced by environment.sh for TOOLKIT_NO_INSTALL=1: installs nothing, needs no network and leaves torch as it is. Uses
# TOOLKIT_VENV, else the active environment, else python3, and ends with 2 where packages are missing.
prefix="${TOOLKIT_VENV:-${VIRTUAL_ENV:-}}"
program="${prefix:+$prefix/bin/}python3"
python="$(command -v "$program")" || { echo "There is no $program to be used as it is." >&2; exit 2; }
"$python" scripts/installed.py ${needed:-}
echo "== environment: $python as it is"
venv="${python%/bin/*}"
# The package need not be installed, and python3 may have no other name.
python() { "$python" "$@"; }
toolkit() { "$python" -m toolkit "$@"; }
export -f python toolkit
export python PATH="${python%/*}:$PATH" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$PWD/.cache/torch_extensions}"
