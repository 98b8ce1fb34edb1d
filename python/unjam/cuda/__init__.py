"""What bench, demo and stress need on GPUs: NCCL beside unjam, and the paper's programs.

`nccl` (the library, by ctypes), `gpus` (what this machine has), `program` (programs 1 and 2 with
unjam: one process or one a GPU), `program_worker` (one such process), `nccl_program` (the same with
NCCL, in child processes that may hang). All but `nccl` and `gpus` need torch.
"""
