"""``make lint`` refuses subjects of commits that are too long, or name no room."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
LONG = "engine: " + "x" * 65  # 73 characters


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    before = set(sys.modules)
    yield importlib.import_module("check_commits")
    for name in ("check_commits", "common"):
        if name not in before:
            sys.modules.pop(name, None)


@pytest.fixture
def git(tmp_path, monkeypatch):
    """``git(words…)`` in an empty repository, whoever's settings this machine has."""
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    for name in ("DIR", "WORK_TREE", "INDEX_FILE"):  # of a hook that runs the tests
        monkeypatch.delenv(f"GIT_{name}", raising=False)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "someone")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "someone@example.org")

    def run(*words):
        command = ["git", "-C", str(tmp_path), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    run("init", "-q", "-b", "main")
    return run


def commit(git, subject):
    git("commit", "-q", "--allow-empty", "-m", subject)
    return git("rev-parse", "HEAD")


@pytest.mark.parametrize(
    "subject",
    ["engine: calls leave in order", "tests/gpu: a", "torch-recipes: b", "unjam.h: c", LONG[:-1]],
)
def test_good_subjects(module, subject):
    assert module.fault(subject) is None


@pytest.mark.parametrize(
    "subject",
    [LONG, "Engine: a", "engine:a", "engine: ", "calls leave in order", "two words: a", ": a", ""],
)
def test_subjects_that_are_refused(module, subject):
    assert module.fault(subject) is not None


def test_only_commits_after_the_base_count_and_no_merges(module, git, tmp_path):
    commit(git, "An old subject")
    base = commit(git, "The base")
    assert module.check(tmp_path, base) == []
    git("checkout", "-q", "-b", "side")
    commit(git, "plan: a good one")
    git("checkout", "-q", "main")
    commit(git, LONG)
    git("merge", "-q", "-m", "Merge side", "side")
    commit(git, "No room")
    first, second = module.check(tmp_path, base)
    assert "does not begin with a room" in first and first.endswith(": No room")
    assert "has 73 characters" in second and second.endswith(LONG)


def test_without_the_history_it_passes_and_says_so(module, git, tmp_path, monkeypatch, capsys):
    commit(git, "No room")
    with pytest.raises(LookupError, match="does not reach back to c324e86"):
        module.check(tmp_path)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert module.main() == 0
    assert "not checked: the history here does not reach" in capsys.readouterr().out


def test_an_archive_has_no_commits(module, git, tmp_path):
    commit(git, "No room")
    (tmp_path / "unpacked").mkdir()  # inside another's repository
    with pytest.raises(LookupError, match="not a git repository"):
        module.check(tmp_path / "unpacked")


def test_without_git_it_passes(module, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LookupError, match="there is no git"):
        module.check(TOOLS.parent)
