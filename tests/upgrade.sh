#!/usr/bin/env bash
# Tests the project with other versions of Python and of what it needs: a row is a fresh virtual environment and the
# default tier in it.
#
#   tests/upgrade.sh                              # all rows, but for a Python that this machine does not have
#   tests/upgrade.sh oldest python3.12            # these rows; a Python that is not there fails
#   tests/upgrade.sh newest -- tests/export -n 0  # other tests: pytest gets what follows --
#   tests/upgrade.sh --list                       # says what each row would be, and does nothing
#
# Rows: python3.11 to python3.13, each with cluster/constraints.txt from the version on that the file names; oldest, with
# the lowest versions of all dependencies in pyproject.toml (extras are free); newest, with the highest ones of
# everything. The last two have the Python of PYTHON (python3.11). Packages come from the index that pip is told of. A row
# that fails leaves the others; then the exit code is 1. Logs are in LOGS, or in a new folder, which the last line names.
set -euo pipefail

cd "$(dirname "$0")/.."

MINORS=(11 12 13)
SHOWN=(torch transformers datasets ray deepspeed)
CONSTRAINTS=cluster/constraints.txt
LEAST=$(sed -n 's/^# .*for Python 3\.\([0-9]*\) and later.*/\1/p' "$CONSTRAINTS")

mistake() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

# The first interpreter of a version that runs and can make virtual environments: pyenv has commands on PATH that do not.
find_python() {
  local each root
  root=$(pyenv root 2>/dev/null) || root=${PYENV_ROOT:-$HOME/.pyenv}
  for each in "$(command -v "$1")" "$root"/versions/"${1#python}".*/bin/"$1"; do
    if "$each" -c 'import ensurepip, venv' 2>/dev/null; then
      printf '%s\n' "$each"
      return
    fi
  done
  return 1
}

# What pip is told of versions, one argument a line.
list_pins() {
  case $1 in
    python3.*) if ((${1#python3.} >= LEAST)); then printf '%s\n' -c "$CONSTRAINTS"; fi ;;
    oldest)
      sed -n '/^dependencies = \[$/,/^\]$/s/^    "\([A-Za-z0-9_-]*\)\(\[.*\]\)\{0,1\}>=\([0-9.]*\).*/\1==\3.*/p' pyproject.toml
      ;;
  esac
}

count() { grep -oE "[0-9]+ ($2)" <<<"$1" | awk "{ sum += \$1 } END { print sum + 0 }"; }

# Makes the environment and tests in it; the results are a line of the table.
run_row() {
  local row=$1 python=$2 folder=$logs/$1 pins=() started=$SECONDS state=passed said='' versions=''
  mkdir -p "$folder"
  mapfile -t pins < <(list_pins "$row")
  printf '\n== %s: %s, %s\n' "$row" "$python" "${pins[*]:-no constraints}"
  if ! {
    "$python" -m venv "$folder/venv" &&
      "$folder/venv/bin/python" -m pip install --quiet --upgrade pip &&
      "$folder/venv/bin/python" -m pip install --quiet "${pins[@]}" -e '.[test]'
  } >"$folder/install.log" 2>&1; then
    state='not installed'
    tail -n 5 "$folder/install.log"
  else
    "$folder/venv/bin/python" -m pip freeze >"$folder/versions.txt" 2>/dev/null || true
    versions=$("$folder/venv/bin/python" -c '
import platform, sys
from importlib.metadata import version
print(platform.python_version(), *(f"{each} {version(each)}" for each in sys.argv[1:]), sep=", ")' "${SHOWN[@]}")
    if ! PATH="$folder/venv/bin:$PATH" HF_HOME="$folder/huggingface" MPLCONFIGDIR="$folder/matplotlib" \
      "$folder/venv/bin/python" -m pytest "${tests[@]}" >"$folder/pytest.log" 2>&1; then
      state=failed
      grep -E '^(FAILED|ERROR)' "$folder/pytest.log" | head -n 20 || tail -n 5 "$folder/pytest.log"
    fi
    said=$(grep -E '^(=+ )?.*(passed|failed|skipped|error).* in [0-9.]+s' "$folder/pytest.log" | tail -n 1 || true)
  fi
  rm -rf "$folder/venv" "$folder/huggingface" "$folder/matplotlib"
  table+=("$(printf '| %s | %s | %s | %s | %s | %s | %s |' "$row" "${versions:-$python}" "$(count "$said" passed)" \
    "$(count "$said" "failed|errors?")" "$(count "$said" skipped)" "$((SECONDS - started))" "$state")")
  [[ $state == passed ]]
}

rows=() tests=() table=() lists=false
while (($#)); do
  case $1 in
    --list) lists=true ;;
    --) shift && tests=("$@") && break ;;
    oldest | newest) rows+=("$1") ;;
    python3.*)
      [[ " ${MINORS[*]} " == *" ${1#python3.} "* ]] || mistake "$1 is no row; there are python3.11 to 3.13."
      rows+=("$1")
      ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0" && exit ;;
    *) mistake "$1 is no row; there are python3.11 to python3.13, oldest and newest." ;;
  esac
  shift
done
asked=${#rows[@]}
((asked)) || rows=("${MINORS[@]/#/python3.}" oldest newest)

export PIP_NO_COMPILE=false # that it compiles is false: pip turns this one round
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 TOKENIZERS_PARALLELISM=false MPLBACKEND=Agg
unset PYTHONDONTWRITEBYTECODE

is_sound=true logs=
$lists || { logs=$(realpath -m "${LOGS:-$(mktemp -d)}") && mkdir -p "$logs"; }
for row in "${rows[@]}"; do
  name=$row
  [[ $row == python3.* ]] || name=${PYTHON:-python3.11}
  if ! python=$(find_python "$name"); then
    table+=("| $row | | | | | | no $name here |")
    ((asked == 0)) && [[ $row == python3.* ]] || is_sound=false
  elif $lists; then
    mapfile -t pins < <(list_pins "$row")
    table+=("| $row | $python | ${pins[*]} |")
  else
    run_row "$row" "$python" || is_sound=false
  fi
done

$lists || printf '\n| row | versions | passed | failed | skipped | seconds | |\n|---|---|---|---|---|---|---|\n'
printf '%s\n' "${table[@]}"
$lists || printf 'logs: %s\n' "$logs"
$is_sound
