"""The clock from Python: machine files, the command line, and what docs/scale.md says."""

import importlib
import json
import re
from pathlib import Path

import pytest

from unjam import clock
from unjam._errors import InvalidArgument
from unjam.cli import main
from unjam.clock import calibrate
from unjam.clock.machine import parse_machine, write_machine

ROOT = Path(__file__).resolve().parents[2]
HGX = (clock.machine.FOLDER / "hgx-h100.toml").read_text()
TIMED = ["plan", "--time", "all_reduce", "--machine", "hgx-h100"]


@pytest.fixture
def scale(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("scale")


# ---- machines ----


@pytest.mark.parametrize("name", clock.machine_names())
def test_machines_have_a_source_for_each_constant(name):
    machine = clock.read_machine(name)
    assert machine.name == name
    assert all(constant.source for constant in machine.constants.values())
    again = parse_machine(write_machine(machine))
    assert again.by_algorithm.keys() == machine.by_algorithm.keys()
    assert again.values("ring") == pytest.approx(machine.values("ring"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("link_us = ", "# ", "link_us is missing"),
        ("link_us = ", "link_uss = ", "link_us is missing"),
        ('name = "hgx-h100"', 'name = "x"\nspeed = 3', "speed is no field"),
        ("link_us = { value = 1.4,", "link_us = { value = -1.4,", "link_us is -1.4: give micro"),
        ("slots = { value = 4,", "slots = { value = 4.5,", "slots is 4.5: give a whole number"),
        ("slots = { value = 4,", "slots = { value = 0,", "slots is 0: give a whole number"),
        ("nic_gb_per_s = { value = 50.0,", "nic_gb_per_s = { value = 0,", "nic_gb_per_s is 0"),
        ("nic_gb_per_s = { value = 50.0,", "nic_gb_per_s = { value = nan,", "give a number"),
        ('device = { value = "cuda"', 'device = { value = "tpu"', "device is 'tpu'"),
        ("link_us = { value = 1.4,", "link_us = { valve = 1.4,", "link_us: write it as"),
        ('name = "hgx-h100"', "name = 3", "name is missing"),
        ("name = ", "name = = ", "is not TOML"),
    ],
)
def test_a_machine_that_makes_no_sense_is_refused(old, new, message, tmp_path, capsys):
    assert old in HGX
    path = tmp_path / "mine.toml"
    path.write_text(HGX.replace(old, new))
    assert main([*TIMED[:3], "--machine", str(path), "--sizes", "8"]) == 2
    error = capsys.readouterr().err
    assert message in error and "mine.toml" in error


def test_a_source_must_say_something():
    text = HGX.replace('source = "ConnectX-7: 400 Gb/s"', 'source = " "')
    with pytest.raises(InvalidArgument, match="nic_gb_per_s.source is empty"):
        parse_machine(text)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("device", "[1]", 'give "host" or "cuda"'),
        ("device", "{ a = 1 }", 'give "host" or "cuda"'),
        ("link_us", "1" + 400 * "0", "give a number of moderate size"),
        ("link_us", "nan", "give a number of moderate size"),
    ],
)
def test_values_that_are_none(field, value, message):
    text = re.sub(
        rf"^{field} = .*$", f'{field} = {{ value = {value}, source = "x" }}', HGX, flags=re.M
    )
    with pytest.raises(InvalidArgument, match=message):
        parse_machine(text)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("slots", 1, "ring needs at least 2 slots, not 1"),
        ("nics_per_node", 1 << 20, "1024 nodes with 1048576 NICs each"),
    ],
)
def test_machines_that_the_clock_cannot_keep(field, value, message):
    text = re.sub(
        rf"^{field} = .*$", f'{field} = {{ value = {value}, source = "x" }}', HGX, flags=re.M
    )
    with pytest.raises(InvalidArgument, match=message):
        clock.time_plan("all_reduce", parse_machine(text), 8192, 1 << 20, "ring")


def test_auto_knows_how_many_ranks_share_a_core():
    text = re.sub(r"^(device = .*value = )\"cuda\"", r'\1"host"', HGX, flags=re.M)
    text = re.sub(
        r"^gpus_per_node = .*$", 'gpus_per_node = { value = 16, source = "x" }', text, flags=re.M
    )
    crowded = re.sub(r"^cores = .*$", 'cores = { value = 2, source = "x" }', text, flags=re.M)
    chosen = [
        clock.time_plan("all_reduce", parse_machine(one), 16, 64 << 10)["algorithm"]
        for one in (text, crowded)
    ]
    assert chosen == ["rsag", "double_binary_tree"]


def test_an_algorithms_own_constants(tmp_path):
    text = HGX + '[algorithm.ring]\nlink_us = { value = 9.0, source = "a test" }\n'
    machine = parse_machine(text)
    assert machine.values("ring")["link_us"] == 9.0
    assert machine.values("rsag")["link_us"] == 1.4
    with pytest.raises(InvalidArgument, match="algorithm.ring.lanes is no field"):
        parse_machine(text.replace("[algorithm.ring]\nlink_us", "[algorithm.ring]\nlanes"))


# ---- times ----


def test_sizes_are_those_of_the_vector():
    machine = clock.read_machine("hgx-h100")
    whole = clock.time_plan("all_gather", machine, 8, 1 << 20, "ring")
    assert whole["bytes"] == 1 << 20
    assert whole["us"] < clock.time_plan("all_reduce", machine, 8, 1 << 20, "ring")["us"]


def test_auto_is_the_selectors_choice_with_its_own_constants():
    machine = clock.read_machine("summit-nccl-2.4")
    auto = clock.time_plan("all_reduce", machine, 6000, 8)
    assert auto["algorithm"] == "double_binary_tree"
    named = clock.time_plan("all_reduce", machine, 6000, 8, "double_binary_tree")
    assert auto["us"] == named["us"]


def test_a_late_rank_is_waited_for():
    machine = clock.read_machine("hgx-h100")
    on_time = clock.time_plan("all_reduce", machine, 8, 8, "double_binary_tree")["us"]
    late = clock.time_plan("all_reduce", machine, 8, 8, "double_binary_tree", late={5: 1000})
    assert 1000 < late["us"] <= 1000 + on_time


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "0 ranks: the clock runs 1 to 1,048,576"),
        ({"ranks": 10**9}, "1000000000 ranks: the clock runs"),
        ({"nbytes": 7}, "7 bytes are not whole elements of 4 bytes"),
        ({"nbytes": 0}, "0 bytes are not whole elements"),
        ({"algorithm": "chain"}, "chain does not serve all_reduce: give auto|ring"),
        ({"algorithm": "tree"}, "there is no algorithm tree"),
        ({"late": {8: 1}}, "late rank 8 is not one of 8 ranks"),
        ({"late": {1: -1}}, "late rank 1: -1 us is no time"),
        ({"root": 8}, "root 8 is not one of 8 ranks"),
        ({"lanes": 99}, "lanes 99 is out of range"),
    ],
)
def test_what_cannot_be_timed_is_named(arguments, message):
    case = {"ranks": 8, "nbytes": 1024} | arguments
    with pytest.raises(InvalidArgument, match=message.replace("|", r"\|")):
        clock.time_plan("all_reduce", clock.read_machine("hgx-h100"), **case)


# ---- the command line ----


def test_times_as_json(capsys):
    words = ["--nodes", "2", "--sizes", "1K,64K", "--algorithms", "auto,ring", "--json"]
    assert main(TIMED + words) == 0
    report = json.loads(capsys.readouterr().out)
    assert "congestion control" in report["not_known"]
    assert [(row["size"], row["asked"]) for row in report["times"]] == [
        (1024, "auto"),
        (1024, "ring"),
        (65536, "auto"),
        (65536, "ring"),
    ]
    assert all(row["us"] > 0 and row["ranks"] == 16 for row in report["times"])


def test_the_path_adds_up(capsys):
    words = ["--nodes", "4", "--sizes", "1M", "--algorithms", "double_binary_tree", "--path"]
    assert main([*TIMED, *words, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["times"]
    path = row["path"]
    assert sum(share["us"] for share in path["shares"]) == pytest.approx(path["us"])
    assert {use["class"] for use in row["busiest"]} >= {"link_out", "nic_in"}
    assert main(TIMED + words) == 0
    out = capsys.readouterr().out
    assert "lanes' slices" in out and "busiest of its class" in out and "A model's times" in out


def test_machines_are_listed(capsys):
    assert main(["plan", "--machines"]) == 0
    assert "summit-nccl-2.4" in capsys.readouterr().out
    assert main(["plan", "--machines", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [machine["name"] for machine in listed] == clock.machine_names()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--machine", "hgx-h10"], "did you mean hgx-h100?"),
        (["--machine", "none.toml"], "none.toml: cannot be read"),
        (["--ranks", "0"], "0 is not a number of ranks"),
        (["--ranks", "1000000000"], "1000000000 is not a number of ranks"),
        (["--nodes", "0"], "--nodes 0: give 1 to"),
        (["--nodes", "1000000000"], "--nodes 1000000000: give 1 to"),
        (["--nodes", "8:2"], "--nodes 8:2"),
        (["--nodes", "x"], "--nodes x: write 64"),
        (["--nodes", "2", "--ranks", "2"], "not both"),
        (["--sizes", "1X"], "--sizes: '1X' is not a size"),
        (["--sizes", "1M:1K"], "--sizes: '1M:1K'"),
        (["--sizes", "2048G"], "--sizes: at most"),
        (["--sizes", "7"], "7 bytes are not whole elements"),
        (["--algorithms", "rings"], "--algorithms rings: choose of auto, ring"),
        (["--algorithms", "chain"], "chain does not serve all_reduce"),
        (["--late", "8:1"], "--late 8: there are 8 ranks"),
        (["--late", "x"], "--late x: write RANK:US"),
        (["--path"], None),
        (["--path", "--sizes", "1K:1M"], "--path is of one case"),
        (["--picture", "x.gif"], "the ending must be"),
        (["--picture-of", "trees"], "--picture-of needs a --picture"),
        (["--count", "5"], "--count means nothing without --check"),
        (["--slots", "5"], "--slots means nothing without --check"),
        (["--hosts", "2"], "--hosts means nothing without --check"),
    ],
)
def test_bad_arguments_end_with_status_2(words, message, capsys):
    try:
        status = main(TIMED + words)
    except SystemExit as end:
        status = end.code
    error = capsys.readouterr().err
    assert status == (0 if message is None else 2)
    assert message is None or message in error


@pytest.mark.parametrize("words", [["--sizes", "8"], ["--late", "1:1"], ["--path"]])
def test_what_times_take_means_nothing_to_the_checker(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(["plan", "--check", "all_reduce", *words])
    assert end.value.code == 2
    assert f"{words[0]} means nothing without --time" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--nodes", "2", "--sizes", "8:4K", "--algorithms", "auto,ring,ring_2d"],
        ["--nodes", "1:4", "--sizes", "8", "--algorithms", "ring,node_trees"],
        ["--ranks", "26", "--sizes", "8", "--picture-of", "trees"],
        ["--nodes", "4", "--sizes", "64K", "--path"],
    ],
)
def test_pictures(words, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.svg"
    assert main([*TIMED, *words, "--picture", str(path)]) == 0
    assert "</svg>" in path.read_text()


def test_calibration_finds_the_constants_that_made_the_times():
    true = {
        "slice_us": 1.5,
        "wait_us": 6.0,
        "peer_us": 1.0,
        "engine_gb_per_s": 4.0,
        "link_gb_per_s": 9.0,
        "base_us": 8.0,
    }
    machine = calibrate.host_machine(true)
    measured = [
        calibrate.Measured(
            name, ranks, size, clock.time_plan("all_reduce", machine, ranks, size, name)["us"]
        )
        for name in ("ring", "one_shot", "double_binary_tree")
        for ranks in (2, 4)
        for size in (64, 4096, 65536)
    ]
    values, error = calibrate.fit(measured)
    assert error < 0.1
    assert values["base_us"] + values["slice_us"] == pytest.approx(9.5, rel=0.5)


def test_this_host_can_be_calibrated(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(calibrate, "_SIZES", (64, 4096))
    monkeypatch.setattr(calibrate, "_SECONDS", 0.01)
    assert main(["plan", "--calibrate"]) == 0
    out = capsys.readouterr().out
    path = tmp_path / "here.toml"
    path.write_text(out)
    assert main([*TIMED[:3], "--machine", str(path), "--ranks", "8", "--sizes", "1K"]) == 0


# ---- what docs/scale.md says ----


def test_trees_gain_at_every_doubling(scale):
    for constants in scale.SETS:
        gains = [scale.ratio(constants, nodes) for nodes in scale.doublings(2, scale.SUMMIT_NODES)]
        assert gains == sorted(gains) and len(set(gains)) == len(gains), constants
        assert 90 <= gains[-1] <= 740
    # As NCCL's own formulas have it.
    ends = [scale.ratio(constants, scale.SUMMIT_NODES) for constants in scale.SETS]
    assert ends == pytest.approx([737, 475, 164], rel=0.01)


def test_2d_rings_gain_the_same_at_every_scale(scale):
    for constants in ("2.4's rule", "2.30, LL"):
        gains = [
            scale.ratio(constants, nodes, scale.RING_2D)
            for nodes in scale.doublings(128, scale.SUMMIT_NODES)
        ]
        assert gains == pytest.approx([gains[-1]] * len(gains), rel=0.1), constants


def test_trees_of_nodes_have_their_ports_bandwidth(scale):
    for nodes in (8, 128, 512):
        assert scale.bus_gb_per_s(scale.SIMPLE, nodes, scale.LONG, scale.TREES) >= 0.88 * 25


@pytest.mark.soak
def test_trees_of_nodes_have_their_ports_bandwidth_on_12288_gpus(scale):
    assert scale.bus_gb_per_s(scale.SIMPLE, 2048, scale.LONG, scale.TREES) >= 0.88 * 25


def test_a_ring_comes_back_later_among_more_gpus(scale):
    sizes = [scale.crossing(scale.RULE, nodes) for nodes in (8, 32, 128)]
    assert sizes == sorted(sizes) and sizes[-1] > sizes[0] > 0
    assert scale.crossing(scale.RULE, 2) == 0


def test_a_step_of_training_gains_as_the_page_says(scale):
    step = scale.Step()
    assert sum(step.buckets()) == 4 * step.parameters
    gains = {
        name: [
            step.ms(scale.RULE, nodes, scale.RING) / step.ms(scale.RULE, nodes, name)
            for nodes in (64, 256, 1024)
        ]
        for name in (scale.RING_2D, scale.TREES)
    }
    for name in (scale.RING_2D, scale.TREES):
        assert gains[name] == sorted(gains[name]), name


def test_the_pages_ratios_are_the_clocks(scale):
    assert scale.ratios_table() in scale.PAGE.read_text()


def test_two_levels_take_fewer_hops_and_keep_the_ports_bandwidth(scale):
    for nodes in (32, 512, scale.SUMMIT_NODES):
        levels, trees = (
            scale.us(scale.LL, nodes, scale.SHORT, name) for name in (scale.LEVELS, scale.TREES)
        )
        assert levels < trees, nodes
    for nodes in (8, 32):
        rate = scale.bus_gb_per_s(scale.SIMPLE, nodes, scale.LONG, scale.LEVELS)
        assert rate >= 0.88 * 25, nodes
