#!/bin/sh
# Install what Plumbline needs into /opt/venv, from /opt/plumbline/{pyproject.toml,constraints.txt}: for both recipes.
#   install.sh [INDEX]   a further index for torch; none: pip's own, whose wheel brings CUDA
set -eu
export DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# A compiler and Python.h: DeepSpeed compiles an operator when it starts on CPUs, Triton its launchers on GPUs
apt-get update
apt-get install --yes --no-install-recommends ca-certificates g++ git python3-dev python3-venv
rm -rf /var/lib/apt/lists/*

cd /opt/plumbline
python3 -m venv /opt/venv
pip="/opt/venv/bin/python -m pip install --constraint constraints.txt"
$pip --upgrade pip setuptools wheel
# torch comes first: DeepSpeed's build looks for it
index=""
[ "${1:-none}" = none ] || index="--extra-index-url $1"
# shellcheck disable=SC2086 # two words or none
$pip "$(grep '^torch==' constraints.txt)" $index
/opt/venv/bin/python - > /tmp/requirements.txt << 'END'
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
print(*project["dependencies"], *(line for name in ("s3", "tasks", "trackio", "wandb") for line in extras[name]), sep="\n")
END
$pip --no-build-isolation --requirement /tmp/requirements.txt
rm /tmp/requirements.txt
