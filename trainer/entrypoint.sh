#!/bin/sh
# Run a trainer command (`train --train.run x`, the default) or a program of the image (`torchrun ...`, `bash`).
# Only a word that resolves to a file is a program: `export` is also a builtin of this shell, but means the command.
set -eu
case "${1-}" in
  "" | -*) ;;
  *) case "$(command -v -- "$1" || true)" in */*) exec "$@" ;; esac ;;
esac
exec python -m trainer "$@"
