#!/bin/sh
# Lets one image take a trainer command (`train --train.run x`, the default), or any program in it (`torchrun ...`,
# `python -m trainer ...`, `bash`). Programs are those that PATH or a path leads to: `export` is a builtin of this shell,
# so it stays the trainer's command.
set -eu
case "${1-}" in
  "" | -*) ;;
  *) case "$(command -v -- "$1" || true)" in */*) exec "$@" ;; esac ;;
esac
exec python -m trainer "$@"
