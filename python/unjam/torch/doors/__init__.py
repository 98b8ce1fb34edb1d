"""Adapters to libraries that move weights: each a file, whose library is imported only there.

    from unjam.torch.doors.megatron import UnjamCopyService
    from unjam.torch.doors.vllm import UnjamTrainerEngine, register

None of them has been run with the library that it is for: each file names the version whose
interface it keeps. ``copies`` is what stands behind the first one, and needs none.
"""
