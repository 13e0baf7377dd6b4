# What both set-ups share; read by them, not run.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
[ $# -eq 1 ] || { echo "usage: $0 VENV" >&2; exit 2; }
venv=$1

make_venv() {
  python=${PYTHON:-$(command -v python3.11 || command -v python3)}
  "$python" -m venv "$venv"
}

# The locked versions are those that were run; pip takes nothing else.
install() {
  lock=$1
  shift
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$here/$lock" "$@"
}

# From this checkout, so that a change is seen at once.
install_hsformat() {
  install "$1" --editable "$root[testing]"
}

# Both engines read their settings when they are imported.
check() {
  OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 "$venv/bin/python" -W ignore -c "$1"
}
