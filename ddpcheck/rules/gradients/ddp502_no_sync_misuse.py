"""DDP502 no-sync-misuse: error

no_sync is not entered, never left, or does not enclose the forward pass.

Why: no_sync takes effect in forward. Around backward alone, it changes nothing. If it is always entered, DDP never
    synchronises, and every rank trains its own model. If it is created but not entered, DDP synchronises in every
    micro-step. (PyTorch docs, DistributedDataParallel.no_sync: the forward pass should be inside.)
Fix: Run forward and backward of every micro-step except the last inside `with ddp.no_sync():`. Run the last or single
    micro-step outside.
Detected: ddpcheck records the order of no_sync, forward and backward passes, and optimizer steps. It reports a step
    in which no backward pass was averaged. It also reports a step that uses gradients which a backward pass has added
    to averaged ones. A no_sync without effect is reported as a warning.
Ignore: If you use local SGD: the ranks step separately on purpose, and average parameters occasionally.
Explains: DDP301 DDP302; DDP306 DDP515 if an error; DDP508 if by steps
Reports: huggingface/accelerate#1726 NVlabs/stylegan2-ada-pytorch#233
Example:
    loss = ddp(x).sum()
    with ddp.no_sync():                      # no_sync takes effect in forward
        loss.backward()                      # right: with ddp.no_sync(): ddp(x).sum().backward()
"""
