#!/bin/sh
# check_exports.sh LIBRARY [LIST]: fails if it exports anything but the C API, or no C API at all; with a file
# that lists symbols, if it exports others than these, or not all of them.
set -eu
symbols=$(nm -D --defined-only "$1" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }')
if [ $# -gt 1 ]; then
  differing=$(printf '%s\n' "$symbols" | LC_ALL=C sort | LC_ALL=C comm -3 - "$2")
  if [ -n "$differing" ]; then
    printf '%s and %s differ (left: only in the first):\n%s\n' "$1" "$2" "$differing" >&2
    exit 1
  fi
  echo "$1 exports what $2 lists"
  exit
fi
foreign=$(printf '%s\n' "$symbols" | grep -v '^unjam' || true)
if [ -n "$foreign" ]; then
  printf '%s exports symbols that are not part of the C API:\n%s\n' "$1" "$foreign" >&2
  exit 1
fi
count=$(printf '%s\n' "$symbols" | grep -c '^unjam' || true)
[ "$count" -gt 0 ] || { echo "$1 exports nothing" >&2; exit 1; }
echo "$1 exports $count functions, all unjam*"
