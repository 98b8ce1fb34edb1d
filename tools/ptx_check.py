"""Checks that ptxas takes PTX that is compiled only to see whether it compiles.

ptx_check.py BUILD_DIR reads the PTX of the target gpu_compiled_only. To assemble it takes ptxas
minutes; to read it, which finds what a GPU does not have, seconds. ptxas names all such errors
before it assembles anything, so each file gets one more line, which is wrong: there must be errors
in that line, or ptxas has not read so far, and nowhere else.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import cuda_toolchain
from common import Failure, main_wrapper

TARGET = re.compile(r"^\.target +(sm_\w+)", re.MULTILINE)
ERROR = re.compile(r"line (\d+); error *: (.*)")
WRONG = ".func unjam_planted() { mov.u32 %planted, 0; }\n"
LIMIT_S = 120  # ptxas, if it should go on to assemble


def errors_of(ptxas: Path, text: str) -> list[str]:
    """What ptxas says of a file, but for its last line, which is wrong on purpose.

    Args:
        ptxas: the assembler.
        text: PTX.

    Raises:
        Failure: it has not found the last line wrong.
    """
    target = TARGET.search(text)
    if target is None:
        raise Failure("this is no PTX: it names no .target")
    text = text.rstrip("\n") + "\n"
    last = text.count("\n") + 1
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "checked.ptx"
        file.write_text(text + WRONG)
        command = [ptxas, f"-arch={target[1]}", "-O0", file, "-o", Path(folder) / "none"]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=LIMIT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Failure(f"ptxas could not be asked: {error}") from error
    said = result.stdout + result.stderr
    errors = [(int(line), words) for line, words in ERROR.findall(said)]
    if result.returncode == 0 or last not in (line for line, _ in errors):
        raise Failure(
            f"ptxas did not find what was planted in line {last}; it says:\n{said[:2000]}"
        )
    return [f"line {line}: {words}" for line, words in errors if line != last]


def main() -> int:
    build = Path(sys.argv[1])
    nvcc = cuda_toolchain.find()
    if nvcc is None:
        raise Failure("there is no nvcc 13, and so no ptxas")
    files = sorted(build.glob("CMakeFiles/gpu_compiled_only.dir/**/*.ptx"))
    if not files:
        raise Failure(f"no PTX below {build}: build the target gpu_compiled_only")
    failures = 0
    for file in files:
        errors = errors_of(nvcc.resolve().parent / "ptxas", file.read_text())
        print(f"{file.name}: {'; '.join(errors) or 'ptxas takes it'}")
        failures += bool(errors)
    return int(failures != 0)


if __name__ == "__main__":
    main_wrapper(main)
