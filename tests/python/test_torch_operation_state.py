"""The states of an operation of torch's adapter are those of the table in operation_state.h.

torch is not needed: the header stands alone.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import unjam

HEADER = Path(unjam.__file__).resolve().parent / "torch" / "csrc" / "operation_state.h"
STATES = ["Open", "OpenAwaited", "Pending", "Listening", "Complete", "CompleteListening", "Told"]
EVENTS = ["Posted", "Awaited", "Ended", "Notified"]

PROGRAM = """
#include <cstdio>
#include <thread>
#include <vector>
#include "operation_state.h"
using namespace unjam_torch;
int main() {
  for (int s = 0; s < %(states)d; ++s) {
    for (int e = 0; e < %(events)d; ++e) {
      const auto after = OperationStateWord::next(OperationState(s), OperationEvent(e));
      std::printf("%%d ", static_cast<int>(after));
    }
  }
  // One thread posts the request, one waits for the end: exactly one of them begins to listen.
  for (int round = 0; round < 500; ++round) {
    OperationStateWord word;
    word.set_open();
    int listeners[2] = {};
    {
      std::jthread posts([&] {
        listeners[0] = word.advance(OperationEvent::kPosted).begins_to_listen();
      });
      std::jthread awaits([&] {
        listeners[1] = word.advance(OperationEvent::kAwaited).begins_to_listen();
      });
    }
    if (listeners[0] + listeners[1] != 1) return 1;
    if (word.now() != OperationState::kListening) return 2;
  }
  // Several threads find the end, and the library calls twice: it is told once.
  for (int round = 0; round < 200; ++round) {
    OperationStateWord word;
    word.advance(OperationEvent::kAwaited);
    int told[4] = {};
    {
      std::vector<std::jthread> threads;
      for (int& mine : told) {
        threads.emplace_back([&word, &mine] {
          word.advance(OperationEvent::kEnded);
          mine = word.advance(OperationEvent::kNotified).made();
        });
      }
    }
    if (told[0] + told[1] + told[2] + told[3] != 1 || !word.complete()) return 3;
  }
}
"""


def table():
    """(state, event) -> the state after, of the comment."""
    found = {}
    for line in HEADER.read_text().splitlines():
        words = re.findall(r"k\w+|[=-]", line.removeprefix("//")) if line.startswith("//") else []
        if len(words) == 1 + len(EVENTS) and words[0].startswith("k"):
            state = words[0][1:]
            for event, after in zip(EVENTS, words[1:], strict=True):
                found[state, event] = state if after in "=-" else after[1:]
    return found


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_transitions_are_those_of_the_table(tmp_path):
    (tmp_path / "states.cc").write_text(PROGRAM % {"states": len(STATES), "events": len(EVENTS)})
    command = ["c++", "-std=c++20", "-O1", "-pthread", f"-I{HEADER.parent}", "states.cc"]
    subprocess.run([*command, "-o", "states"], cwd=tmp_path, check=True)
    result = subprocess.run([tmp_path / "states"], capture_output=True, text=True, check=True)
    numbers = iter(result.stdout.split())
    made = {(state, event): STATES[int(next(numbers))] for state in STATES for event in EVENTS}
    assert made == table()
    text = HEADER.read_text()
    assert re.findall(r"^  k(\w+), +//", text, flags=re.M) == STATES + EVENTS
