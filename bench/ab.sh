#!/bin/bash
# Two builds of the library side by side, measured in turns on the GPUs that are there: some minutes.
#
#   bench/ab.sh BASE HEAD [ROW…] [--draws N] [--json FILE]      rows: such as 'stream/*'; none: all
#
# BASE and HEAD are folders with a built library (build/cuda), or commits: those are built first, in
# build/ab/COMMIT, once. The same twice is an A/A. What a row and a verdict are: bench/ab.py.
set -eu
shopt -s inherit_errexit
if [ $# -lt 2 ]; then
  sed -n '2,8s/^# \{0,1\}//p' "$0"
  exit 2
fi
root=$(cd "$(dirname "$0")/.." && pwd)

# Prints the folder of a build; makes it of a commit.
folder() {
  if [ -f "$1/libunjam.so.0" ]; then
    (cd "$1" && pwd)
    return
  fi
  local commit place
  commit=$(git -C "$root" rev-parse --verify --quiet "$1^{commit}") || {
    echo "ab.sh: $1 is neither a folder with libunjam.so.0 nor a commit" >&2
    return 1
  }
  place=$root/build/ab/$commit
  if [ ! -f "$place/build/complete" ]; then
    echo "ab.sh: building $1 in $place" >&2
    rm -rf "$place"
    git -C "$root" worktree prune
    git -C "$root" worktree add --quiet --detach "$place" "$commit"
    cmake -S "$place" -B "$place/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DUNJAM_CUDA=ON \
      -DUNJAM_TESTS=OFF >&2
    cmake --build "$place/build" >&2
    touch "$place/build/complete"
  fi
  echo "$place/build"
}

base=$(folder "$1")
head=$(folder "$2")
shift 2
export NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1
PYTHONPATH=$root/python${PYTHONPATH:+:$PYTHONPATH} exec python3 "$root/bench/ab.py" "$base" "$head" "$@"
