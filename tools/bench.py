"""make bench: builds bench/*.cc in the release preset and runs those named, or all of them."""

from __future__ import annotations

import sys

import setup_env
from ci import build
from common import ROOT, Failure, main_wrapper, run, say


def main() -> int:
    setup_env.ensure("build")
    setup_env.ensure_gtest()
    names = sorted(path.stem for path in (ROOT / "bench").glob("*.cc"))
    chosen = sys.argv[1:] or names
    unknown = [name for name in chosen if name not in names]
    if unknown or not chosen:
        raise Failure(
            f"benchmarks in bench/: {', '.join(names) or 'none'}; not {', '.join(unknown)}"
        )
    build("release", *(f"bench_{name}" for name in chosen))
    for name in chosen:
        say(f"bench/{name}")
        run([ROOT / "build" / "release" / "bench" / name])
    return 0


if __name__ == "__main__":
    main_wrapper(main)
