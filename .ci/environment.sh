# Make (once) and activate the environment of the examples and the tests, outside the tree. Source it from the root.
# DUALMESH_ENV chooses the folder, PYTHON the interpreter (3.11 or newer).
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "dualmesh needs Python 3.11 or newer, found $("$python" --version). Set PYTHON to one." >&2
    exit 1
}
key=$({ "$python" --version; pwd; cat pyproject.toml .ci/environment.sh; } | sha256sum | cut -c1-12)
environment=${DUALMESH_ENV:-${XDG_CACHE_HOME:-$HOME/.cache}/dualmesh/$key}
if [ ! -e "$environment/ready" ]; then
    echo "Installing dualmesh with torch and JAX into $environment (once; a few minutes)."
    rm -rf "$environment"
    "$python" -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 jax==0.10.2
    "$environment/bin/pip" install --quiet --disable-pip-version-check --editable '.[torch,jax,examples,test]'
    touch "$environment/ready"
fi
. "$environment/bin/activate"
