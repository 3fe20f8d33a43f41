#!/bin/sh
# Makes the environment that every other target uses. Run it through `make setup`: the Makefile's head says which
# settings it takes. Does nothing when the environment is the one asked for; a half-made one is made again.
set -eu

venv=$VENV
stamp=$venv/.ddp-tutorial # written last: what the environment was made for
ours=$venv/.ddp-tutorial-ours # written first: this script made the folder, so it may delete it

fail() {
    echo "setup: $*" >&2
    exit 2
}

supported() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null
}

made_for() { # line 1, 2 or 3 of the stamp: project folder, Python, wheel index
    sed -n "$1p" "$stamp" 2>/dev/null || true
}

wanted() {
    printf '%s\n' "$PWD" "$python" "$index"
    cat pyproject.toml
}

# What is not said again stays as it was.
python=${PYTHON:-$(made_for 2)}
index=${TORCH_INDEX:-$(made_for 3)}
wanted | cmp -s - "$stamp" && exit 0

outdated() {
    [ "$(wanted | sed -n 2,3p)" = "$(sed -n 2,3p "$stamp")" ] || return 0
    case $venv in
        /*) return 1 ;;                     # elsewhere, and maybe another clone's: it only gets what it lacks
        *) [ "$(made_for 1)" != "$PWD" ] ;; # of a folder that was moved: its paths lead to the old place
    esac
}

if [ -e "$ours" ] && { [ ! -e "$stamp" ] || outdated; }; then
    echo "setup: $venv is unfinished or was made for other settings: making it again"
    rm -rf "$venv"
fi

if [ ! -x "$venv/bin/python" ]; then
    [ ! -e "$venv" ] || fail "$venv exists but holds no Python: delete it, or choose another with VENV=FOLDER"
    for base in ${python:-python3 python3.13 python3.12 python3.11 python3.10}; do
        supported "$base" && break
        base=
    done
    [ -n "$base" ] || fail "${python:-python3} is no Python 3.10 to 3.13: name one with PYTHON=/path/to/python"

    echo "setup: making $venv with $("$base" --version)"
    mkdir -p "$venv"
    touch "$ours"
    make_venv() {
        "$base" -m venv "$venv" >"$venv/setup.log" 2>&1 || "$base" -m virtualenv "$venv" >>"$venv/setup.log" 2>&1
    }
    if ! make_venv; then # Debian and Ubuntu keep it in a package of its own
        package=$("$base" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
        [ "$(id -u)" = 0 ] && sudo= || sudo="sudo -n"
        command -v apt-get >/dev/null && ${sudo:-true} true 2>/dev/null ||
            fail "Python has no venv module: install it (on Debian and Ubuntu: sudo apt install $package), then try again"
        echo "setup: installing $package"
        { $sudo apt-get update && $sudo apt-get install -y "$package" && make_venv; } >>"$venv/setup.log" 2>&1 ||
            fail "cannot make $venv: see $venv/setup.log"
    fi
fi

pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check "$@" || fail "pip failed (see above): try again"
}
supported "$venv/bin/python" || fail "$venv holds another Python than 3.10 to 3.13: choose another with VENV=FOLDER"
if [ -n "$index" ]; then
    pip install torch torchvision --index-url "$index"
fi
pip install -e ".[dev]"
wanted >"$stamp.new"
mv "$stamp.new" "$stamp"
echo "setup: $venv is ready"
