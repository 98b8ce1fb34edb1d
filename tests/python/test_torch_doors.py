"""Adapters to libraries that are not here, with stand-ins.

What ranks of a process group do is in doors_checks.py, which test_torch_reshard.py runs.
"""

import importlib
import threading

import pytest

torch = pytest.importorskip("torch")

import stand_ins  # noqa: E402
import unjam  # noqa: E402

SOON_S = 200


def functions(path):
    """Pairs: what upstream has, and what a module gives for it."""
    module = importlib.import_module(path)
    for name, words in stand_ins.SIGNATURES[path].items():
        owner, function = name.split(".")
        yield name, words, getattr(getattr(module, owner), function)


@pytest.mark.parametrize("path", stand_ins.SIGNATURES)
def test_stand_ins_have_upstreams_signatures(path):
    """Also the real ones, where they are installed."""
    stand_ins.install()
    for name, words, function in functions(path):
        assert stand_ins.words_of(function) == words, name


def test_adapters_can_be_called_as_what_they_stand_for():
    stand_ins.install()
    from unjam.torch.doors import megatron, vllm

    for path, base, adapter, more in (
        ("megatron.core.resharding.copy_services.base", "CopyService", megatron.UnjamCopyService,
         {"__init__": ", *key, *piece_bytes, *window"}),
        ("vllm.distributed.weight_transfer.base", "WeightTransferEngine", vllm.UnjamEngine, {}),
        ("vllm.distributed.weight_transfer.base", "TrainerWeightTransferEngine",
         vllm.UnjamTrainerEngine, {"__init__": ", *job, *chunk_bytes"}),
    ):  # fmt: skip
        assert not getattr(adapter, "__abstractmethods__", None), adapter
        for name, words in stand_ins.SIGNATURES[path].items():
            owner, function = name.split(".")
            if owner == base:
                found = stand_ins.words_of(getattr(adapter, function))
                assert found == words + more.get(function, ""), name


@pytest.mark.parametrize("door, library", [("megatron", "Megatron-LM"), ("vllm", "vLLM")])
def test_without_the_library_the_error_says_so(door, library, monkeypatch):
    import sys

    for name in list(sys.modules):
        if name.split(".")[0] == door or name == f"unjam.torch.doors.{door}":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, door, None)
    with pytest.raises(ImportError, match=f"is not here: install .*{library}"):
        importlib.import_module(f"unjam.torch.doors.{door}")


def test_a_rank_sends_itself_what_has_gaps(launch):
    """No piece fills it: what stays is copied once, and not written over by an empty copy."""
    from unjam.torch.doors.copies import Copies

    def rank_main(context, group):
        copies = Copies(group)
        x = torch.arange(12.0).reshape(3, 4)
        out = torch.zeros(4, 3).t()
        copies.send(x, context.rank)
        copies.receive(out, context.rank)
        copies.run()
        return torch.equal(out, x)

    assert all(launch(2, rank_main))


def test_after_an_error_what_has_gaps_is_as_it_was(launch):
    """The piece is under way when its sender goes."""
    from unjam.torch.doors.copies import Copies

    begun = threading.Event()

    def rank_main(context, group):
        copies = Copies(group)
        x = torch.ones(64, 64)
        out = torch.full((64, 64), 7.0).t()
        agreed, end = copies._agreed, copies._end

        def gone(*operations):
            agreed(*operations)
            assert begun.wait(SOON_S)
            context.abort()
            raise unjam.Aborted("gone")

        def ending(*arguments):
            begun.set()
            return end(*arguments)

        if context.rank == 0:
            copies.send(x, 1)
            copies._agreed = gone
        else:
            copies.receive(out, 0)
            copies._end = ending
        with pytest.raises(torch.distributed.DistBackendError):
            copies.run()
        return bool((out == 7).all())

    assert all(launch(2, rank_main))


def test_copies_that_have_failed_are_out_of_use(launch):
    """A rank that was late is one use behind: the next run would take the first one's bytes."""
    from unjam.torch.doors.copies import Copies

    gave_up = threading.Event()

    def rank_main(context, group):
        copies = Copies(group, key="one")
        other = 1 - context.rank
        x, out = torch.ones(4), torch.zeros(4)
        copies._limit = 0.05 if context.rank == 0 else None
        if context.rank == 1:
            assert gave_up.wait(SOON_S)
        copies.send(x, other)
        copies.receive(out, other)
        if context.rank == 0:
            with pytest.raises(torch.distributed.DistBackendError):
                copies.run()
            gave_up.set()
            with pytest.raises(unjam.InvalidUsage, match="under another key"):
                copies.run()
            context.abort()  # rank 1 would wait for it
        else:
            with pytest.raises(torch.distributed.DistBackendError):
                copies.run()
        return True

    assert all(launch(2, rank_main))


def test_copies_take_any_strides_and_shapes(launch):
    from unjam.torch.doors.copies import Copies

    def rank_main(context, group):
        copies = Copies(group)
        one = torch.full((9,), 3.0)[::9]  # one element, its stride is not 1
        wide = torch.arange(6.0).reshape(2, 3)
        row = torch.tensor([1 + 2j, 3j, 4])

        def pairs():
            return [
                (one, torch.zeros(1, 9)[:, ::9]),
                (one.reshape(()), torch.zeros(())),
                (wide, torch.zeros(3, 2)),
                (wide.t(), torch.zeros(2, 6)[:, ::2]),
                (row.expand(2, 3), torch.zeros(2, 3, dtype=row.dtype)),
                (torch.zeros(0, 4), torch.zeros(4, 0)),
            ]

        batch = [(peer, *pair) for peer in range(2) for pair in pairs()]
        for peer, source, target in batch:
            copies.send(source, peer)
            copies.receive(target, peer)
        copies.run()
        return [(x.reshape(-1).tolist(), y.reshape(-1).tolist()) for _, x, y in batch]

    for found in launch(2, rank_main):
        for sent, received in found:
            assert sent == received


def test_copies_that_are_closed_keep_no_groups(launch):
    from unjam.torch.doors.copies import Copies

    def rank_main(context, group):
        for turn in range(2):  # under the same key again
            copies = Copies(group)
            x, out = torch.full((4,), turn + 1.0), torch.zeros(4)
            copies.send(x, 1 - context.rank)
            copies.receive(out, 1 - context.rank)
            copies.run()
            made = list(copies._groups.values())
            copies.close()
            copies.close()
            assert len(made) == 2 and all(each._closed for each in made)
            assert torch.equal(out, x)
            with pytest.raises(unjam.InvalidUsage, match="since they are closed"):
                copies.run()
        return True

    assert all(launch(2, rank_main))


def test_what_cannot_be_copied_is_refused_when_it_is_submitted():
    from unjam.torch.doors.copies import Copies

    z = torch.ones(4, dtype=torch.complex64)
    with unjam.init_all(1) as contexts:
        copies = Copies(contexts[0].group())
        for tensor, words in (
            (z.conj(), "lazy conjugation"),
            (z.conj().imag, "lazy conjugation or negation"),
            (torch.eye(2).to_sparse(), "sparse"),
            (torch.empty(2, device="meta"), "without memory"),
        ):
            for call in (copies.send, copies.receive):
                with pytest.raises(unjam.InvalidArgument, match=words):
                    call(tensor, 0)
        with pytest.raises(unjam.InvalidArgument, match="share memory"):
            copies.receive(torch.zeros(1).expand(4), 0)
        with pytest.raises(unjam.InvalidArgument, match="task='a' is no number"):
            copies.send(z, 0, "a")
        copies.run()  # nothing was added


def test_a_rank_without_memory_ends_the_batch_on_all_ranks(launch, monkeypatch):
    from unjam.torch.doors import copies as door

    flat = door._Flat

    def made(tensor, is_source):
        if tensor.numel() == 13:
            raise MemoryError("no memory for 13")
        return flat(tensor, is_source)

    monkeypatch.setattr(door, "_Flat", made)

    def rank_main(context, group):
        copies = door.Copies(group)
        for size in (13, 12):
            out = torch.zeros(size)
            if context.rank:
                copies.send(torch.ones(size), 0)
            else:
                copies.receive(out, 1)
            if size == 13:
                with pytest.raises(unjam.InvalidArgument, match="cannot take part: no memory"):
                    copies.run()
            else:
                copies.run()
        return context.rank == 1 or bool((out == 1).all())

    assert all(launch(2, rank_main))


class Source:
    """A trainer's weights, which change."""

    def __init__(self):
        self.scale = 1.0
        generator = torch.Generator().manual_seed(3)
        self.weights = {
            f"layer{n}": torch.randn(3 + n, 5, generator=generator).to(
                torch.bfloat16 if n % 2 else torch.float32
            )
            for n in range(9)
        }
        self.weights["flags"] = torch.ones(4, dtype=torch.bool)

    def metadata(self):
        from types import SimpleNamespace

        return [
            SimpleNamespace(name=name, dtype=x.dtype, shape=tuple(x.shape))
            for name, x in self.weights.items()
        ]

    def __iter__(self):
        for name, x in self.weights.items():
            yield name, x if x.dtype is torch.bool else x * self.scale


class Model:
    def __init__(self):
        self.loaded = {}
        self.calls = 0

    def load_weights(self, weights):
        self.calls += 1
        self.loaded.update(weights)


class Client:
    """As vLLM's: a call returns when all workers have done their part, each in its process."""

    def __init__(self, engines):
        self.engines = engines
        self.calls = []

    def _all(self, call):
        errors = []

        def one(engine):
            try:
                call(engine)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=(engine,)) for engine in self.engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def init_weight_transfer_engine(self, init_info):
        self.calls.append("init")
        self._all(lambda engine: engine.init_transfer_engine(engine.parse_init_info(init_info)))

    def start_weight_update(self):
        self.calls.append("start")
        self._all(lambda engine: engine.start_weight_update())

    def update_weights(self, update_info):
        self.calls.append("update")
        self._all(lambda engine: engine.update_weights(update_info))

    def finish_weight_update(self):
        self.calls.append("finish")
        self._all(lambda engine: engine.finish_weight_update())


@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 30])
def test_weights_go_to_vllms_workers(chunk_bytes):
    stand_ins.install()
    from unjam.torch.doors.vllm import UnjamEngine, UnjamTrainerEngine, UnjamTrainerInit

    workers = 4
    engines = [
        UnjamEngine(None, stand_ins.parallel(n, workers), torch.device("cpu"), Model())
        for n in range(workers)
    ]
    client, source = Client(engines), Source()
    trainer = UnjamTrainerEngine.trainer_init(
        None,
        UnjamTrainerInit(workers, chunk_bytes, rank=0),
        client=client,
        source=source,
    )
    other = UnjamTrainerEngine.trainer_init(
        None, UnjamTrainerInit(workers, rank=1), client=client, source=source
    )
    try:
        for scale in (1.0, 2.0):
            source.scale = scale
            trainer.send_weights()
            other.send_weights()  # runs the source's collectives alone
            for engine in engines:
                assert list(engine.model.loaded) == list(source.weights)
                for name, x in source:
                    assert torch.equal(engine.model.loaded[name], x), name
                    assert engine.model.loaded[name].dtype is x.dtype
        assert client.calls == ["init"] + 2 * ["start", "update", "finish"]
        calls = {1: 20, 100: None, 1 << 30: 2}[chunk_bytes]
        assert calls is None or engines[0].model.calls == calls
    finally:
        closing = [threading.Thread(target=e.shutdown) for e in (*engines, trainer)]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
    with pytest.raises(unjam.InvalidUsage, match="shut down"):
        trainer.send_weights()
    with pytest.raises(unjam.InvalidUsage, match="init_transfer_engine first"):
        engines[0].update_weights({"names": [], "dtype_names": [], "shapes": []})


def doors_of(workers, source, chunk_bytes=1):
    """A trainer's engine, and those of its workers."""
    stand_ins.install()
    from unjam.torch.doors.vllm import UnjamEngine, UnjamTrainerEngine, UnjamTrainerInit

    engines = [
        UnjamEngine(None, stand_ins.parallel(n, workers), torch.device("cpu"), Model())
        for n in range(workers)
    ]
    init = UnjamTrainerInit(workers, chunk_bytes, rank=0)
    client = Client(engines)
    return engines, UnjamTrainerEngine.trainer_init(None, init, client=client, source=source)


def causes_of(error):
    while error is not None:
        yield error
        error = error.__cause__


def ended(engines, trainer):
    """Whether all have left the job, and say so."""
    with pytest.raises(unjam.InvalidUsage, match="a transfer has failed"):
        trainer.send_weights()
    for engine in engines:
        with pytest.raises(unjam.InvalidUsage, match="init_transfer_engine first"):
            engine.update_weights({"names": [], "dtype_names": [], "shapes": []})
        engine.shutdown()
    trainer.shutdown()
    return True


@pytest.mark.timeout(SOON_S)
def test_a_worker_that_cannot_load_ends_the_transfer_everywhere():
    source = Source()
    engines, trainer = doors_of(3, source)

    def load_weights(weights):
        raise RuntimeError("no room for layer0")

    engines[1].model.load_weights = load_weights
    with pytest.raises(Exception) as caught:  # of the worker that the client asks first
        trainer.send_weights()
    assert isinstance(caught.value, (RuntimeError, unjam.UnjamError))
    assert ended(engines, trainer)


@pytest.mark.timeout(SOON_S)
def test_a_client_that_fails_ends_the_transfer():
    """No worker ever hears of it, so the trainer would wait for all of them."""
    engines, trainer = doors_of(2, Source())

    def update_weights(update_info):
        raise ConnectionError("no such server")

    trainer.client.update_weights = update_weights
    with pytest.raises(ConnectionError, match="no such server") as caught:
        trainer.send_weights()
    assert [type(e) for e in causes_of(caught.value)] == [ConnectionError, unjam.Aborted]
    for engine in engines:
        engine.shutdown()


@pytest.mark.timeout(SOON_S)
@pytest.mark.parametrize("what", ["raises", "ends early", "gives more"])
def test_a_source_that_fails_ends_the_transfer_on_the_workers(what):
    source = Source()
    engines, trainer = doors_of(2, source)
    kind, words = {
        "raises": (KeyError, "layer4"),
        "ends early": (unjam.InvalidArgument, "the source gives nothing"),
        "gives more": (unjam.InvalidArgument, "gives 'extra', too"),
    }[what]

    class Wrong(Source):
        def __iter__(self):
            for name, x in super().__iter__():
                if name == "layer4" and what == "raises":
                    raise KeyError(name)
                if name == "layer4" and what == "ends early":
                    return
                yield name, x
            if what == "gives more":
                yield "extra", torch.ones(1)

    trainer.source = Wrong()
    with pytest.raises(kind, match=words) as caught:
        trainer.send_weights()
    # What the workers said is not lost.
    assert any(isinstance(e, unjam.Peer) for e in causes_of(caught.value))
    assert ended(engines, trainer)


@pytest.mark.timeout(SOON_S)
def test_a_second_init_leaves_the_first_job():
    stand_ins.install()
    from unjam.torch.doors.vllm import UnjamTrainerEngine, UnjamTrainerInit

    engines, first = doors_of(2, Source())
    old = [engine._job for engine in engines]
    second = UnjamTrainerEngine.trainer_init(
        None, UnjamTrainerInit(2, rank=0), client=first.client, source=Source()
    )
    assert all(job._context.closed for job in old)
    second.send_weights()
    for engine in (*engines, first, second):
        engine.shutdown()


def test_what_is_wrong_with_an_update_is_named():
    stand_ins.install()
    from unjam.torch.doors import vllm

    for names, types, shapes, said in (
        (["a"], [], [[1]], "1 names, 0 dtype_names"),
        (["a", "a"], ["int32"] * 2, [[1]] * 2, "'a' is there twice"),
        (["a"], ["floaty"], [[1]], "tensor 'a': torch has no type 'floaty'"),
    ):
        with pytest.raises(ValueError, match=said):
            vllm.UnjamUpdate(names, types, shapes)
    with pytest.raises(unjam.InvalidUsage, match="make a UnjamTrainerEngine"):
        vllm.UnjamEngine.trainer_send_weights(iter(()), {})
    with pytest.raises(ValueError, match="workers=0"):
        vllm.UnjamTrainerEngine.trainer_init(
            None, vllm.UnjamTrainerInit(0, rank=0), client=None, source=None
        )
    source = Source()
    with pytest.raises(ValueError, match="metadata say 'layer1'"):
        vllm._next(iter(source), source.metadata()[1])
    vllm.register()
    vllm.register()
    assert vllm.WeightTransferEngineFactory._registry["unjam"]() is vllm.UnjamEngine
