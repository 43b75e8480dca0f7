"""DDP601 debug-level-crash: error, keeps_gradients, keeps_results

TORCH_DISTRIBUTED_DEBUG=DETAIL is set, and with gloo torch crashes when a module is wrapped.

Why: In the supported versions of torch, DDP's logger casts a process group that DETAIL has wrapped. The result is a
    segmentation fault, for any model and any world size. INFO is safe.
Fix: Set TORCH_DISTRIBUTED_DEBUG=INFO, or call dist.set_debug_level(dist.DebugLevel.DETAIL) after init_process_group.
Detected: No check reports this code, because the crash ends the process before ddpcheck can run. ddpcheck does not
    pass the variable on to the ranks that it starts.
Ignore: It is never reported.
Example:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    DistributedDataParallel(model)           # with gloo; right: "INFO"
"""
