#!/bin/sh
# Everything a GPU should be asked, in one command: docs/gpu.md. `bench/gpu.sh --help` says what can be chosen.
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu/run.py" "$@"
