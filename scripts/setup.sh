#!/usr/bin/env bash
# Makes .venv with everything that tests, demo, docs and benchmarks need.
#
# Needs Python 3.11 or newer with its venv module, and nothing else. Safe to run again: a finished
# environment is left alone, an interrupted one is completed or, where files are missing, made anew.
#
#   KVQUILT_PYTHON          the interpreter to use (default: the first fit of python3.11 ... python3)
#   KVQUILT_PIP_TORCH_ARGS  more pip arguments for torch, for instance the index of the CPU builds
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
stamp=$venv/.kvquilt-ready
locks=(requirements/torch.lock.txt requirements/engine.lock.txt requirements/dev.lock.txt)
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf '[setup %3ds] %s\n' "$SECONDS" "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# What decides whether the environment is the right one. It holds the place too: a virtual
# environment does not survive being moved or copied.
fingerprint() {
    { pwd; cat pyproject.toml "${locks[@]}" scripts/setup.sh; } | sha256sum | cut -d' ' -f1
}

is_ready() { [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$(fingerprint)" ]]; }

find_python() {
    local candidate
    for candidate in ${KVQUILT_PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "no Python >= 3.11 with venv found (tried: ${KVQUILT_PYTHON:-python3.11 python3.12 python3.13 python3}).
  On Debian and Ubuntu: apt-get install python3-venv. Or name one: KVQUILT_PYTHON=/path/to/python make setup"
}

make_venv() {
    if [[ -e $venv ]] && ! "$venv/bin/python" scripts/check_env.py whole; then
        say "$venv is incomplete: making it anew"
        rm -rf "$venv"
    fi
    if [[ ! -e $venv ]]; then
        local python
        python=$(find_python)
        say "1/5 $venv from $("$python" --version)"
        "$python" -m venv "$venv"
    fi
}

pip_install() { "$venv/bin/python" -m pip install "$@"; }

has_pins() { "$venv/bin/python" scripts/check_env.py pins "$@" 2>/dev/null; }

install_packages() {
    local torch=requirements/torch.lock.txt engine=requirements/engine.lock.txt dev=requirements/dev.lock.txt
    if ! has_pins "$torch"; then
        say "2/5 torch (about 200 MB for the CPU build)"
        # shellcheck disable=SC2086  # a list of arguments, split on purpose
        pip_install ${KVQUILT_PIP_TORCH_ARGS:-} -r "$torch"
    fi
    if "$venv/bin/python" scripts/check_env.py brings-triton; then
        # A GPU build of torch pins its own triton, which must stay.
        grep -v '^triton==' "$engine" >"$venv/engine.lock.txt"
        engine=$venv/engine.lock.txt
    fi
    if ! has_pins "$engine"; then
        say "3/5 the engine and what it needs (about 800 MB)"
        pip_install --no-deps -r "$engine"
    fi
    if ! has_pins "$dev"; then
        say "4/5 tools for tests, types, lint and docs"
        pip_install --no-deps -r "$dev"
    fi
    say "5/5 kvquilt itself, editable"
    pip_install --quiet --no-deps --no-build-isolation -e .
    "$venv/bin/python" scripts/check_env.py pins "$torch" "$engine" "$dev" ||
        die "versions differ from requirements/; run it again, or remove $venv first"
}

verify() {
    "$venv/bin/python" scripts/check_env.py whole || die "packages lack files (disk full?); run it again"
    # Loaded once, so that a broken engine shows here and not as a hundred failing tests.
    HF_HUB_OFFLINE=1 "$venv/bin/python" -c 'import torch, vllm.config' >"$venv/import.log" 2>&1 ||
        die "the engine does not import; remove $venv and run it again. It said: $(tail -n 3 "$venv/import.log")"
}

is_ready && exit 0
mkdir -p .cache
if command -v flock >/dev/null; then
    # Two runs at once: the second waits, then finds everything done.
    exec 9>.cache/setup.lock
    flock 9
    is_ready && exit 0
fi
make_venv
install_packages
verify
fingerprint >"$stamp"
say "done: $venv is ready"
