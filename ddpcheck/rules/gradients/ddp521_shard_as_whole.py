"""DDP521 shard-as-whole: error

A rank's shard of the parameters is used as the whole, or the whole as a shard.

Why: Under fully_shard, each parameter is a DTensor, and each rank holds one shard of it. state_dict() and to_local()
    return that shard. A file of rank 0 alone lacks the shards of the other ranks. If every rank loads this file, each
    parameter becomes one shard, repeated. The same happens if every rank draws the values of its shard from the same
    seed. Shapes agree, so no error is raised. (PyTorch docs, torch.distributed.checkpoint.state_dict.)
Fix: On all ranks, call get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)),
    and save the result on rank 0. Load it on all ranks with set_model_state_dict(...,
    options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)). Or let torch.distributed.checkpoint
    save all shards.
Detected: `ddpcheck run` reports torch.save of a model's shards if only some ranks save theirs. It compares the shards
    of the ranks in some steps and after torch.load. It reports equal shards on ranks that should hold different ones.
    If torch raises an error because whole tensors are loaded or copied into shards, the line is reported. `ddpcheck
    run` also reports a single norm over gradients of which some are shards and others are whole. It reports
    load_state_dict of an optimizer if every rank then has the same state for different shards. `ddpcheck report`
    reports such an optimizer state before the first step. Parameters that reach the loss only through an all_to_all
    (experts, embedding tables) belong to one rank each. An all_reduce of their gradients over all ranks is reported.
Ignore: If the file is for inspection only, or if shards are equal at the start on purpose, as in a model of identical
    blocks.
Example:
    fully_shard(model)
    if rank == 0:
        torch.save(model.state_dict(), path)     # right: get_model_state_dict(model, options=FULL), on every rank
"""
