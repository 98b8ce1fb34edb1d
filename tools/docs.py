"""make docs: builds the site into build/site, and what of its pages is made from sources.

docs.py             makes an environment of its own (build/docs-venv) and builds the site
docs.py --generate  writes the pages that are made from sources (tools/docs_pages.py); needs the
                    package: run it with .venv/bin/python
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import docs_pages
import setup_env
from common import ROOT, Failure, main_wrapper, run, say

DOCS_VENV = ROOT / "build" / "docs-venv"
SITE = ROOT / "build" / "site"


def installed() -> bool:
    """Whether build/docs-venv has what the site is built with, so that nothing is fetched."""
    python, stamp = DOCS_VENV / "bin" / "python", DOCS_VENV / "requirements"
    if not python.exists() or not stamp.is_file():
        return False
    return stamp.read_text() == "\n".join(setup_env.requirements("docs", python=python))


def check() -> None:
    """The site is built, with warnings as errors, if that needs no package index."""
    if installed():
        build()
    else:
        say("the site is not built: `make docs` has not made build/docs-venv; links are checked")


def ensure_environment() -> Path:
    """build/docs-venv with what the site is built with; gives its Python."""
    python = DOCS_VENV / "bin" / "python"
    if not python.exists():
        made = subprocess.run(
            [sys.executable, "-m", "venv", DOCS_VENV], capture_output=True, text=True
        )
        if made.returncode != 0:
            shutil.rmtree(DOCS_VENV, ignore_errors=True)
            raise Failure(
                f"`python3 -m venv` failed: {(made.stdout + made.stderr).strip()}\n"
                "On Debian and Ubuntu: apt-get install python3-venv"
            )
    words = setup_env.requirements("docs", python=python)
    stamp = DOCS_VENV / "requirements"
    if installed():
        return python
    say(f"installing into {DOCS_VENV.relative_to(ROOT)}: {', '.join(words)}")
    install = [python, "-m", "pip", "install", "--quiet", "--retries", "2"]
    install += ["--disable-pip-version-check", "--no-input", *words]
    result = subprocess.run(install, capture_output=True, text=True)
    if result.returncode != 0:
        tail = "\n".join((result.stdout + result.stderr).strip().splitlines()[-6:])
        raise Failure(
            f"the site needs {', '.join(words)}, and pip could not install them:\n{tail}\n"
            "If no package index can be reached: PIP_INDEX_URL names another, https_proxy a proxy"
        )
    stamp.write_text("\n".join(words))
    return python


def build() -> None:
    """The site, from docs/ and the pages at the root that tools/docs_hooks.py names."""
    python = ensure_environment()
    command = [python, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", SITE]
    # Material says once a build that its successor is another program.
    run(command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    say(f"the site is built: {(SITE / 'index.html').relative_to(ROOT)}")


def main() -> int:
    if sys.argv[1:] == ["--generate"]:
        for path in docs_pages.write():
            say(f"written: {path.relative_to(ROOT)}")
        return 0
    if sys.argv[1:]:
        raise Failure("usage: docs.py [--generate]")
    build()
    return 0


if __name__ == "__main__":
    main_wrapper(main)
