"""DDP522 rank-dependent-compilation: warning

On some ranks only, torch.compile compiles a function repeatedly, or to different operations.

Why: One rank may compile for a tenth of a second or for minutes. Meanwhile, all others wait in the reduction of
    gradients. After 8 recompilations (torch._dynamo.config.recompile_limit), torch gives up. That rank then runs the
    function without compilation, slower than the others. If the code itself depends on the rank, the ranks train
    different models. (PyTorch docs, torch.compile, Recompilation.)
Fix: Pad batches to one shape, or compile for any size: torch.compile(dynamic=True) or torch._dynamo.mark_dynamic.
    Make Python values and branches in forward the same on every rank.
Detected: ddpcheck records what each rank compiles in training, and which guard (condition for reusing compiled code)
    failed. `ddpcheck run`, `ddpcheck.watch` and the compiled steps of `ddpcheck report` do this. Three cases are
    reported. The same guard fails at least twice on one rank and never on another. Only some ranks reach the
    recompile limit. For inputs of the same shapes, a function always compiles to different operations on different
    ranks. Functions with graph breaks are not compared for the third case.
Ignore: If the recompilations end soon: this rank has already met all its shapes, and the others will meet theirs
    later.
Example:
    model = DistributedDataParallel(torch.compile(net, dynamic=False))
    for tokens in loader:                    # lengths that vary on one rank
        model(tokens).backward()             # right: torch.compile(net), which compiles for any length at the second
"""
