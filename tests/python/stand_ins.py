# ruff: noqa: B027 - some methods may stay as they are
"""Stand-ins for libraries that are not here: their interfaces, for tests of unjam.torch.doors.

``SIGNATURES`` has what they are compared with: of Megatron-LM at commit
12dd401117694195f260fd884dab26f0746d7523 (megatron/core/resharding/copy_services/base.py), and of
vLLM at commit 02f250b03f38822ccdb63f27a3005d10ca81f385 (vllm/distributed/weight_transfer/base.py)
and 047c993cc49c32e9b94f5bf826a9214e163eb982 (factory.py there).
"""

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import torch.distributed as dist

SIGNATURES = {
    "megatron.core.resharding.copy_services.base": {
        "CopyService.__init__": "self, group",
        "CopyService.submit_send": "self, src_tensor, dest_rank, task_id",
        "CopyService.submit_recv": "self, dest_tensor, src_rank, task_id",
        "CopyService.run": "self",
        "CopyService.close": "self",
        "CopyService.set_model_roles": "self, *is_source, *is_destination",
    },
    "vllm.distributed.weight_transfer.base": {
        "WeightTransferEngine.__init__": "self, config, vllm_config, device, model",
        "WeightTransferEngine.set_weight_update_target": "self, model, model_config",
        "WeightTransferEngine.reset_weight_update_target": "self",
        "WeightTransferEngine.parse_init_info": "self, init_dict",
        "WeightTransferEngine.parse_update_info": "self, update_dict",
        "WeightTransferEngine.init_transfer_engine": "self, init_info",
        "WeightTransferEngine.start_weight_update": "self",
        "WeightTransferEngine.finish_weight_update": "self",
        "WeightTransferEngine.update_weights": "self, update_info",
        "WeightTransferEngine.receive_weights": "self, update_info",
        "WeightTransferEngine.shutdown": "self",
        "WeightTransferEngine.trainer_send_weights": "iterator, trainer_args",
        "TrainerWeightTransferEngine.__init__": "self, config, *client, *source, *is_sender",
        "TrainerWeightTransferEngine.trainer_init": "config, init_info, *client, *source",
        "TrainerWeightTransferEngine.send_weights": "self",
        "TrainerWeightTransferEngine.shutdown": "self",
        "TrainerInitInfo.__init__": "self, *rank",
    },
    "vllm.distributed.weight_transfer.factory": {
        "WeightTransferEngineFactory.register_engine": "name, module_path_or_cls, class_name",
        "WeightTransferTrainerFactory.register_engine": "name, module_path_or_cls, class_name",
    },
}


class CopyService(ABC):
    requires_process_group_barrier = True
    supports_idle_ranks = True

    def __init__(self, group=None):
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    @abstractmethod
    def submit_send(self, src_tensor, dest_rank, task_id=None): ...

    @abstractmethod
    def submit_recv(self, dest_tensor, src_rank, task_id=None): ...

    @abstractmethod
    def run(self): ...

    def close(self):
        pass

    def set_model_roles(self, *, is_source, is_destination):
        pass


@dataclass
class WeightTransferInitInfo(ABC):  # noqa: B024
    pass


@dataclass
class TrainerInitInfo(WeightTransferInitInfo):
    rank: int = field(kw_only=True)

    @property
    def is_sender(self):
        return self.rank == 0


@dataclass
class WeightTransferUpdateInfo(ABC):  # noqa: B024
    pass


class WeightTransferEngine(ABC):
    supports_draft_weight_update = True

    def __init__(self, config, vllm_config, device, model):
        self.config = config
        self.parallel_config = vllm_config.parallel_config
        self.device = device
        self.model = model

    def set_weight_update_target(self, model, model_config):
        self.model = model

    def reset_weight_update_target(self):
        pass

    def parse_init_info(self, init_dict):
        return self.init_info_cls(**init_dict)

    def parse_update_info(self, update_dict):
        return self.update_info_cls(**update_dict)

    @abstractmethod
    def init_transfer_engine(self, init_info): ...

    @abstractmethod
    def start_weight_update(self): ...

    @abstractmethod
    def finish_weight_update(self): ...

    def update_weights(self, update_info):
        self.receive_weights(self.parse_update_info(update_info))

    @abstractmethod
    def receive_weights(self, update_info): ...

    @abstractmethod
    def shutdown(self): ...

    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator, trainer_args): ...


class TrainerWeightTransferEngine(ABC):
    def __init__(self, config, *, client, source, is_sender=True):
        self.config, self.client, self.source = config, client, source
        self.is_sender = is_sender

    @classmethod
    @abstractmethod
    def trainer_init(cls, config, init_info, *, client, source): ...

    @abstractmethod
    def send_weights(self): ...

    def shutdown(self):
        pass


class _Factory:
    @classmethod
    def register_engine(cls, name, module_path_or_cls, class_name=None):
        if name in cls._registry:
            raise ValueError(f"{name} is registered already")
        cls._registry[name] = lambda: module_path_or_cls


class WeightTransferEngineFactory(_Factory):
    _registry = {}


class WeightTransferTrainerFactory(_Factory):
    _registry = {}


MEMBERS = {
    "megatron.core.resharding.copy_services.base": [CopyService],
    "vllm.distributed.weight_transfer.base": [
        WeightTransferInitInfo,
        TrainerInitInfo,
        WeightTransferUpdateInfo,
        WeightTransferEngine,
        TrainerWeightTransferEngine,
    ],
    "vllm.distributed.weight_transfer.factory": [
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    ],
}


def install():
    """Puts them where imports find them; what is there really stays."""
    for path, members in MEMBERS.items():
        names = path.split(".")
        for n in range(1, len(names) + 1):
            sys.modules.setdefault(".".join(names[:n]), ModuleType(".".join(names[:n])))
        for member in members:
            setattr(sys.modules[path], member.__name__, member)


def words_of(function):
    """A signature as in SIGNATURES: a star before what is given by name alone."""
    import inspect

    return ", ".join(
        ("*" if p.kind is p.KEYWORD_ONLY else "") + p.name
        for p in inspect.signature(function).parameters.values()
    )


def parallel(worker, workers):
    """Of a worker's config, what the engine looks at: two data parallel halves."""
    size = max(1, workers // 2)
    config = SimpleNamespace(
        data_parallel_index=worker // size, world_size=size, rank=worker % size
    )
    return SimpleNamespace(parallel_config=config)
