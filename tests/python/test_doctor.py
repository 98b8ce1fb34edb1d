"""``unjam doctor``: what each finding says, and its cure."""

import json
import resource
from types import SimpleNamespace

import pytest

from unjam.cli import doctor, main
from unjam.cuda import driver, gpus

H100 = driver.Gpu("NVIDIA H100", (9, 0))
B200 = driver.Gpu("NVIDIA B200", (10, 0))
V100 = driver.Gpu("Tesla V100", (7, 0))


class FakeCuda:
    """libcuda.so.1 with GPUs of its own."""

    def __init__(self, version=13000, init=0, gpus=(), cut=()):
        self.version, self.init, self.gpus, self.cut = version, init, gpus, cut

    def cuDriverGetVersion(self, place):
        place._obj.value = self.version
        return 0

    def cuInit(self, flags):
        return self.init

    def cuDeviceGetCount(self, place):
        place._obj.value = len(self.gpus)
        return 0

    def cuDeviceGet(self, place, index):
        place._obj.value = 10 + index  # a handle is no index
        return 0

    def cuDeviceCanAccessPeer(self, place, device, other):
        place._obj.value = int((device - 10, other - 10) not in self.cut)
        return 0

    def cuDeviceGetName(self, buffer, size, device):
        buffer.value = self.gpus[device - 10].name.encode()
        return 0

    def cuDeviceGetAttribute(self, place, attribute, device):
        place._obj.value = self.gpus[device - 10].capability[attribute - 75]
        return 0


def test_a_machine_without_a_driver():
    machine = driver.look("libcuda-of-nobody.so.1")
    assert "no NVIDIA driver" in machine.lacks and machine.gpus == ()
    assert doctor.driver_finding(machine).state == doctor.ABSENT


def test_what_the_driver_says():
    machine = driver.ask(FakeCuda(13010, gpus=(H100, B200), cut={(1, 0)}))
    assert machine == driver.Machine("", 13010, (H100, B200), ((1, 0),))
    assert machine.cuda_text == "13.1"
    assert driver.ask(FakeCuda(init=100)).lacks == "this process sees no GPU"
    assert driver.ask(FakeCuda()).lacks == "this process sees no GPU"
    assert "error 999" in driver.ask(FakeCuda(init=999)).lacks


def test_an_old_driver(monkeypatch):
    machine = driver.Machine("", 12080, (H100,))
    monkeypatch.setattr(gpus, "cuda_part", lambda: True)
    line = doctor.driver_finding(machine)
    assert line.state == doctor.WRONG and "12.8" in line.text and "driver 580" in line.cure
    monkeypatch.setattr(gpus, "cuda_part", lambda: False)  # nothing here needs it
    assert doctor.driver_finding(machine).state == doctor.ABSENT
    assert doctor.driver_finding(driver.Machine("", 13000, (H100,))).state == doctor.OK


def test_gpus(monkeypatch):
    line = doctor.gpus_finding(driver.Machine("", 13000, (H100, H100)))
    assert (line.state, line.text, line.cure) == (doctor.OK, "2 x NVIDIA H100", "")
    line = doctor.gpus_finding(driver.Machine("", 13000, (H100, B200)))
    assert line.state == doctor.OK and "untested" in line.text
    line = doctor.gpus_finding(driver.Machine("", 13000, (B200, V100)))
    assert line.state == doctor.WRONG and "V100 has compute capability 7.0" in line.cure
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    line = doctor.gpus_finding(driver.Machine("this process sees no GPU", 13000))
    assert line.state == doctor.ABSENT and "CUDA_VISIBLE_DEVICES is empty" in line.cure


def test_peer_access():
    assert doctor.peers_finding(driver.Machine("none")).state == doctor.ABSENT
    assert doctor.peers_finding(driver.Machine("", 13000, (H100,))).state == doctor.ABSENT
    assert doctor.peers_finding(driver.Machine("", 13000, (H100,) * 3)).state == doctor.OK
    line = doctor.peers_finding(driver.Machine("", 13000, (H100,) * 3, ((0, 2), (2, 0))))
    assert line.state == doctor.WRONG and "GPU 0 does not reach GPU 2 (2 such" in line.text


def test_a_gpu_without_the_cuda_part(monkeypatch):
    monkeypatch.setattr(gpus, "cuda_part", lambda: False)
    monkeypatch.setattr(driver, "look", lambda: driver.Machine("", 13000, (H100,)))
    line = doctor.cuda_part_line()
    assert line.state == doctor.WRONG and "+cu13" in line.cure
    assert doctor.gpu_trial_line().state == doctor.ABSENT
    monkeypatch.setattr(driver, "look", lambda: driver.Machine("none"))
    line = doctor.cuda_part_line()
    assert (line.state, line.cure) == (doctor.ABSENT, "")


def test_the_adapter(tmp_path, monkeypatch):
    file = tmp_path / "adapter.so"
    target = SimpleNamespace(python_include=str(tmp_path))
    extension = SimpleNamespace(library_file=lambda: file, target=lambda: target)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    line = doctor.adapter_finding(extension)
    assert line.state == doctor.WRONG and "apt-get install g++" in line.cure
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/" + name)
    assert "python3-dev" in doctor.adapter_finding(extension).cure
    (tmp_path / "Python.h").touch()
    assert doctor.adapter_finding(extension).state == doctor.OK
    file.touch()
    assert "ready" in doctor.adapter_finding(extension).text


def test_limits():
    assert doctor.limits_finding(8 << 30, 65536).state == doctor.OK
    assert doctor.limits_finding(8 << 30, resource.RLIM_INFINITY).state == doctor.OK
    small = doctor.limits_finding(64 << 20, 65536)
    assert small.state == doctor.ABSENT and "--shm-size" in small.cure
    assert "ulimit -n" in doctor.limits_finding(8 << 30, 256).cure


def test_unknown_variables(monkeypatch):
    monkeypatch.setenv("UNJAM_LANES", "2")
    line = doctor.environment_line()
    assert line.state == doctor.OK and "UNJAM_LANES" in line.text
    monkeypatch.setenv("UNJAM_LANE", "2")
    line = doctor.environment_line()
    assert line.state == doctor.WRONG and "did you mean UNJAM_LANES?" in line.text


@pytest.mark.parametrize("value", ["many", "0"])
def test_a_bad_setting_is_found(value, monkeypatch):
    monkeypatch.setenv("UNJAM_LANES", value)
    line = doctor.host_line()
    assert line.state == doctor.WRONG and "UNJAM_LANES" in line.text


def test_the_whole_on_this_machine(capsys):
    status = main(["doctor", "--json"])
    lines = [doctor.Line(**line) for line in json.loads(capsys.readouterr().out)]
    assert len(lines) == len(doctor.CHECKS)
    assert status == int(any(line.state == doctor.WRONG for line in lines))
    by_part = {line.what: line for line in lines}
    assert by_part["version"].state == by_part["host device"].state == doctor.OK
    for line in lines:  # what is wrong has a cure, or says it in its text
        assert line.state in (doctor.OK, doctor.WRONG, doctor.ABSENT) and line.text


@pytest.mark.parametrize(("encoding", "mark"), [("utf-8", "✓  version"), ("ascii", "ok  version")])
def test_marks_fit_the_terminal(encoding, mark, python, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    program = (
        "from unjam.cli import doctor, main\n"
        "doctor.CHECKS = (doctor.version_line,)\n"
        "main(['doctor'])"
    )
    result = python("-c", program)
    assert result.stdout.startswith(mark), result.stdout + result.stderr


def test_what_a_neighbour_takes_of_a_gpu():
    memory = {"neighbour_first_bytes": 222 << 20, "neighbour_most_bytes": 1332 << 20}
    line = doctor.gpu_trial_finding(8, 0.84, memory)
    assert line.state == doctor.OK
    assert line.text == "8 met in 0.8 s; 222 to 1,332 MiB of each for a neighbour"
    assert len(doctor.text_of(line)) <= 80
    assert "neighbour" not in doctor.gpu_trial_finding(1, 0.2, memory).text
