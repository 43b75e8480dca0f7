"""DDP523 state-not-loaded: error

load_state_dict(strict=False) loads nothing, because the keys of the state have a different prefix.

Why: The keys of a state taken from a DistributedDataParallel begin with 'module.'. The keys of a compiled module
    begin with '_orig_mod.'. With strict=False torch loads the keys that match and ignores the others. If no key
    matches, training starts from the initial values of the model. (PyTorch docs, torch.nn.Module.load_state_dict.)
Fix: Take and load the state of the same module (`ddp.module` on both sides), or remove the prefix:
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, 'module.'). Without strict=False, torch
    raises.
Detected: `ddpcheck run` compares the keys of each loaded state with those of the module. A load is reported if no key
    matches and most keys would match with a different prefix. It is not reported if a matching state is loaded before
    the next optimizer step or the end of the script.
Ignore: If the load does nothing on purpose.
Example:
    state = torch.load("checkpoint.pt")                # of ddp.state_dict(): "module.head.weight"
    ddp.module.load_state_dict(state, strict=False)    # right: ddp.load_state_dict(state)
"""
