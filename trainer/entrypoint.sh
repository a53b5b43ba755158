#!/bin/sh
# Run a trainer command (`train --train.run x`, the default) or a program of the image (`torchrun ...`, `bash`).
# Only a word that resolves to a file is a program: `export` is also a builtin of this shell, but means the command.
set -eu
# Pods run as uid 10001 or, on some fabrics, as root; both have group 0 and write to the same folders.
umask 0002
case "${1-}" in
  "" | -*) ;;
  *) case "$(command -v -- "$1" || true)" in */*) exec "$@" ;; esac ;;
esac
exec python -m trainer "$@"
