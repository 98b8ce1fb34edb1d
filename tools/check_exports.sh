#!/bin/sh
# check_exports.sh LIBRARY: fails if it exports anything but the C API, or no C API at all.
set -eu
symbols=$(nm -D --defined-only "$1" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }')
foreign=$(printf '%s\n' "$symbols" | grep -v '^unjam' || true)
if [ -n "$foreign" ]; then
  printf '%s exports symbols that are not part of the C API:\n%s\n' "$1" "$foreign" >&2
  exit 1
fi
count=$(printf '%s\n' "$symbols" | grep -c '^unjam' || true)
[ "$count" -gt 0 ] || { echo "$1 exports nothing" >&2; exit 1; }
echo "$1 exports $count functions, all unjam*"
