"""Settings as keywords."""

import ctypes

import pytest

import unjam
import unjam._torch_settings
from unjam import InvalidArgument, InvalidType, _abi
from unjam._config import field_names, make_config


def test_defaults_are_left_to_the_library():
    config = make_config({"lanes": None})
    assert (config.size, config.version) == (ctypes.sizeof(_abi.Config), _abi.VERSION)
    signed = ("policy", "order", "algorithm", "device", "device_index")
    assert all(getattr(config, name) == (-1 if name in signed else 0) for name in field_names())


def test_values():
    config = make_config(
        {
            "policy": "hold",
            "order": "priority",
            "algorithm": "one_shot",
            "lanes": 3,
            "pool_slots": 0,
        }
    )
    assert (config.policy, config.order, config.algorithm, config.lanes) == (2, 1, 1, 3)
    assert config.pool_slots == 2**32 - 1
    config = make_config({"device": "cuda", "device_index": 3})
    assert (config.device, config.device_index) == (1, 3)
    assert make_config({"device": "host", "device_index": -1}).device_index == -1
    assert make_config({"policy": 1, "algorithm": "auto"}).policy == 1


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        (
            {"lane": 1},
            InvalidType,
            "'lane' is not a setting: did you mean lanes",
        ),
        ({"size": 1}, InvalidType, "is not a setting"),
        ({"policy": "greedy"}, InvalidArgument, "use one of adaptive, fixed, hold"),
        ({"order": 7}, InvalidArgument, "use one of fifo, priority"),
        ({"device": "gpu"}, InvalidArgument, "use one of host, cuda"),
        ({"device_index": -2}, InvalidArgument, "out of range"),
        ({"device_index": "cuda:0"}, InvalidType, "device_index must be an integer"),
        ({"lanes": 1.5}, InvalidType, "lanes must be an integer"),
        ({"lanes": True}, InvalidType, "lanes must be an integer"),
        ({"lanes": -1}, InvalidArgument, "out of range"),
        ({"lanes": 2**32}, InvalidArgument, "out of range"),
    ],
)
def test_errors(setting, error, message):
    with pytest.raises(error, match=message):
        make_config(setting)
    with pytest.raises(error, match=message):
        unjam.init_all(2, **setting)


def test_the_library_checks_ranges_too():
    with pytest.raises(InvalidArgument, match=r"(?i)lanes"):
        unjam.init_all(1, lanes=33)


def test_settings_arrive():
    with unjam.init_all(1, lanes=2, policy="fixed", quantum_slices=77) as (context,):
        settings = context.info()["settings"]
        assert settings["UNJAM_LANES"] == 2
        assert settings["UNJAM_QUANTUM_SLICES"] == 77
        assert context.stats().lanes == 2


def test_environment_is_used(monkeypatch):
    monkeypatch.setenv("UNJAM_LANES", "3")
    with unjam.init_all(1) as (context,):
        assert context.stats().lanes == 3
    with unjam.init_all(1, lanes=1) as (context,):
        assert context.stats().lanes == 1


def test_unknown_variables_are_named_once_a_process(python, monkeypatch):
    monkeypatch.setenv("UNJAM_LANE", "3")
    monkeypatch.setenv("UNJAM_TORCH_BUILD", "/tmp")  # others read it
    monkeypatch.setenv("UNJAM_COMMIT", "0")
    program = (
        "import unjam, unjam._torch_settings as torch_settings, os\n"
        "os.environ |= {variable.name: '' for variable in torch_settings.ALL}\n"
        "for _ in range(2):\n"
        "    with unjam.init_all(2): pass\n"
    )
    result = python("-c", program)
    assert result.returncode == 0
    lines = [line for line in result.stderr.splitlines() if line.startswith("unjam:")]
    assert [line.split(" warn: ")[1] for line in lines] == [
        "UNJAM_LANE is set, but unjam has no such variable: did you mean UNJAM_LANES? "
        "(`unjam env` lists all)"
    ]


def test_former_keywords():
    with pytest.warns(DeprecationWarning, match="escape_slots is now called guaranteed_slots") as w:
        config = make_config({"escape_slots": 3})
    assert config.guaranteed_slots == 3
    assert [str(warning.filename) for warning in w] == [__file__]
    with pytest.warns(DeprecationWarning, match="borrow_slots is now called pool_slots"):
        assert make_config({"borrow_slots": 0}).pool_slots == 2**32 - 1
    with pytest.warns(DeprecationWarning, match="mesh is now called rsag"):
        assert make_config({"algorithm": "mesh"}).algorithm == 2
    with pytest.raises(InvalidArgument, match="leave out the former name"):
        make_config({"escape_slot_bytes": 4096, "guaranteed_slot_bytes": 8192})


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(
    ("former", "name", "given", "other"),
    [
        ("UNJAM_SOLO_OVERLAP", "UNJAM_IN_STREAM_OVERLAP", 0, 1),
        ("UNJAM_ESCAPE_SLOTS", "UNJAM_GUARANTEED_SLOTS", 3, 4),
        ("UNJAM_BORROW_SLOTS", "UNJAM_POOL_SLOTS", 0, 4),
    ],
)
def test_a_former_name_counts_and_is_named_once(
    python, monkeypatch, both, former, name, given, other
):
    monkeypatch.setenv(former, str(given))
    if both:
        monkeypatch.setenv(name, str(other))
    program = (
        "import unjam\n"
        "with unjam.init_all(1) as (a,), unjam.init_all(1) as (b,):\n"
        f"    assert a.info()['settings']['{name}'] == {other if both else given}\n"
    )
    result = python("-c", program)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("unjam:")]
    (text,) = [line.split(" warn: ")[1] for line in lines]
    assert text.startswith(f"{former} is now called {name}")
    assert ("leave out the former name" in text) == both


def test_former_names_of_algorithms_count_and_are_named_once(python, monkeypatch):
    program = (
        "import numpy, unjam\n"
        "with unjam.init_all(2) as contexts:\n"
        "    assert contexts[0].info()['settings']['UNJAM_ALGORITHM'] == 'rsag'\n"
        "    groups = [context.group() for context in contexts]\n"
        "    x = [numpy.ones(2, numpy.float32) for _ in groups]\n"
        "    for request in [g.all_reduce(a, algorithm='direct') for g, a in zip(groups, x)]:\n"
        "        request.wait()\n"
        "    (used,) = {key['algorithm'] for key in contexts[0].info()['keys']}\n"
        "    assert used == 'one_shot', used\n"
    )
    monkeypatch.setenv("UNJAM_ALGORITHM", "mesh")
    result = python("-c", program)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("unjam:")]
    assert [line.split(" warn: ")[1].partition(": use that")[0] for line in lines] == [
        "UNJAM_ALGORITHM: mesh is now called rsag",
        "direct is now called one_shot",
    ]


def test_a_wrong_value_is_named_by_the_name_it_was_given_under(monkeypatch):
    monkeypatch.setenv("UNJAM_SOLO", "maybe")
    with pytest.raises(InvalidArgument, match="UNJAM_SOLO=maybe is not valid"):
        unjam.init_all(1)
    monkeypatch.setenv("UNJAM_SOLO", "off")
    monkeypatch.setenv("UNJAM_IN_STREAM", "")  # says nothing
    with unjam.init_all(1) as (context,):
        assert context.info()["settings"]["UNJAM_IN_STREAM"] == 0


@pytest.mark.parametrize("name", ["UNJAM_HELP", "UNJAM_IN_STREAM", "UNJAM_LINES"])
def test_switches_are_words(name, monkeypatch):
    for on, words in enumerate((("off", "No", "FALSE", "0"), ("on", "yes", "True", "1"))):
        for word in words:
            monkeypatch.setenv(name, word)
            with unjam.init_all(1) as (context,):
                assert context.info()["settings"][name] == on, word
    for nonsense in ("maybe", "2", "yes!", "0x1", "-2"):
        monkeypatch.setenv(name, nonsense)
        with pytest.raises(InvalidArgument, match=f"{name}={nonsense} is not valid: give .*0 or 1"):
            unjam.init_all(1)
    monkeypatch.setenv(name, "")
    unjam.init_all(1).close()


def test_a_mistyped_variable_of_torch_is_named_where_unjam_is_not_used(monkeypatch, python):
    assert unjam._torch_settings.unknown() == []
    monkeypatch.setenv("UNJAM_TORCH_DEFALT", "1")
    monkeypatch.setenv("UNJAM_TORCH_CUDA", "0")
    (text,) = unjam._torch_settings.unknown()
    assert text.endswith("no such variable: did you mean UNJAM_TORCH_DEFAULT?")
    pytest.importorskip("torch")
    result = python(
        "-c", "import torch, unjam.torch, torch.distributed as d; print(d.Backend.UNJAM)"
    )
    assert result.returncode == 0 and "unjam" in result.stdout
    assert "did you mean UNJAM_TORCH_DEFAULT?" in result.stderr
