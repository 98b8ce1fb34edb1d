"""The package's own lines: through ``logging``, in the library's form and files.

The library's lines (of its C++ part) do not pass through ``logging``: it writes them while the
interpreter may be waiting for it.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys

# Levels by name and, as the library takes them too, by number.
_LEVELS = {
    word: level
    for level, words in {
        logging.WARNING: ("warn", "0"),
        logging.INFO: ("info", "1"),
        logging.DEBUG: ("debug", "2"),
    }.items()
    for word in words
}
# The library looks for a process's rank in the same places (src/runtime/job_id.cc).
_RANKS = ("UNJAM_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")

logger = logging.getLogger("unjam")


class _Lines(logging.Handler):
    """Writes them as the library does: whole, to stderr or to the rank's file.

    A program that has handlers of its own gets the lines through these; then this one is silent,
    but for a file that UNJAM_LOG_FILE names.
    """

    def __init__(self, pattern: str) -> None:
        super().__init__()
        self._pattern = pattern
        self.setFormatter(
            logging.Formatter(
                "unjam: %(asctime)s.%(msecs)03d %(unjam_level)s: %(message)s", "%H:%M:%S"
            )
        )

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether nobody else writes it."""
        others = [h for h in logger.handlers if h is not self] + logging.getLogger().handlers
        return bool(self._pattern) or not others

    def format(self, record: logging.LogRecord) -> str:
        names = ((logging.WARNING, "warn"), (logging.INFO, "info"))
        record.unjam_level = next((name for n, name in names if record.levelno >= n), "debug")
        return super().format(record)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record).replace("\n", "\\n") + "\n"
            if not (self._pattern and self._append(line)) and sys.stderr is not None:
                sys.stderr.write(line)
                sys.stderr.flush()
        except Exception:  # as handlers do: a log that cannot be written is no reason to end
            self.handleError(record)

    def _append(self, line: str) -> bool:
        """Whether there is such a file. (If not, the library says so.)"""
        try:
            # A FIFO without a reader would make the open wait.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
            file = os.open(self._path(), flags, 0o644)
            try:
                os.write(file, line.encode(errors="replace"))
            finally:
                os.close(file)
        except OSError:
            return False
        return True

    def _path(self) -> str:
        rank = next((os.environ[name] for name in _RANKS if os.environ.get(name)), "0")
        parts = {"%%": "%", "%r": rank, "%p": str(os.getpid()), "%h": socket.gethostname()}
        return re.sub("%[%rph]", lambda sign: parts[sign[0]], self._pattern)


def _configure() -> None:
    """Once, at import. A level that there is not is named by the library, at the first context."""
    logger.addHandler(_Lines(os.environ.get("UNJAM_LOG_FILE", "")))
    level = _LEVELS.get(os.environ.get("UNJAM_LOG", ""))
    if level is not None:
        logger.setLevel(level)


_configure()
