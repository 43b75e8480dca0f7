"""DDP5xx: the training loop around the wrapper; `data` has those on its data."""

from ddpcheck.findings.rules.rule import rules

RULES = rules("""
DDP501 forward-bypassed: error
Gradients are computed by a forward pass that bypasses the wrapper.
why: DDP prepares its reducer in its own forward. ddp.module(x), a parameter used outside forward, functional_call on
the inner module and torch.autograd.grad all bypass the reducer. Nothing is reduced, and nothing is raised. (PyTorch
docs, DistributedDataParallel: torch.autograd.grad does not work with it; call the wrapped module.)
fix: Call the wrapper, not the module in it; move code that uses parameters into the module's forward.
detected: DDP501 is reported if the loss depends on parameters of the wrapped module, but the wrapper was not called for
this loss. `ddpcheck run` also reports parameters that an optimizer trains and no wrapper holds.
ignore: If the gradients are averaged in another way, or if each rank should train these parameters separately.
explains: DDP208 DDP306 DDP515
reports: jingyaogong/minimind#853 intel/e2eAIOK#198 kohya-ss/sd-scripts#989
example:
output = ddp.module(x)                   # right: output = ddp(x)
output.sum().backward()

DDP502 no-sync-misuse: error
no_sync is not entered, never left, or does not enclose the forward pass.
why: no_sync takes effect in forward. Around backward alone, it changes nothing. If it is always entered, DDP never
synchronises, and every rank trains its own model. If it is created but not entered, DDP synchronises in every
micro-step. (PyTorch docs, DistributedDataParallel.no_sync: the forward pass should be inside.)
fix: Run forward and backward of every micro-step except the last inside `with ddp.no_sync():`. Run the last or single
micro-step outside.
detected: ddpcheck records the order of no_sync, forward and backward passes, and optimizer steps. It reports a step in
which no backward pass was averaged. It also reports a step that uses gradients which a backward pass has added to
averaged ones. A no_sync without effect is reported as a warning.
ignore: If you use local SGD: the ranks step separately on purpose, and average parameters occasionally.
explains: DDP301 DDP302; DDP306 DDP515 if an error; DDP508 if by steps
reports: huggingface/accelerate#1726 NVlabs/stylegan2-ada-pytorch#233
example:
loss = ddp(x).sum()
with ddp.no_sync():                      # no_sync takes effect in forward
    loss.backward()                      # right: with ddp.no_sync(): ddp(x).sum().backward()

DDP503 changed-after-wrapping: error, stops_ddp, spreads
A parameter was added, replaced, removed, frozen, unfrozen, cast or moved after wrapping.
why: DDP has put its hooks on the tensors that it found when it was constructed. Tensors that replace them have no
hooks. (`.double().float()` and `.cpu().cuda()` replace tensors, pytorch issue 104336.) DDP waits for frozen parameters,
and never reduces unfrozen and added ones. A forward pass that ties, replaces or deletes layers also comes too late.
(PyTorch docs, DistributedDataParallel: do not change parameters after wrapping.)
fix: Finish the module first, wrap it last; wrap again after any such change.
detected: ddpcheck compares the module's parameters with those at the construction of the wrapper. It compares identity,
dtype, device and requires_grad.
ignore: If a parameter is frozen after wrapping and find_unused_parameters=True is set.
explains: DDP208 if same subjects; DDP101 DDP102 DDP103 DDP106 DDP301 DDP302 DDP303 DDP304 DDP305 DDP312 DDP306; DDP516
if only the loss
reports: pytorch/pytorch#104336 Lightning-AI/pytorch-lightning#17937
example:
ddp = DistributedDataParallel(model)
model.head = nn.Linear(8, 3)             # right: replace the head first, then wrap

DDP504 stale-optimizer: error
The optimizer holds tensors that are no longer the module's parameters, or lacks some that are.
why: An optimizer built before the module was cast, moved or extended updates stale tensors. The model then does not
change. (PyTorch docs, torch.optim: construct optimizers after moving the model.)
fix: Give the optimizer all parameters, once the module has its final ones, device and dtype; freeze the others first.
detected: ddpcheck compares the tensors of the optimizer with the parameters of the modules. A parameter with gradients
is reported if no optimizer holds it and it does not change. Also reported: parameters that a custom optimizer (not from
torch.optim) holds but never changes, while it does change others.
ignore: If code other than an optimizer updates the parameters.
example:
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.head = nn.Linear(8, 3)             # right: replace the head first, then make the optimizer

DDP507 learning-rate: error
The learning rate differs between ranks, or its schedule makes world_size steps at a time.
why: The gradients are equal but the updates are not, so parameters diverge from this step on. The usual cause is a
scheduler that steps on a local metric (ReduceLROnPlateau). (PyTorch docs, DistributedDataParallel: all processes must
make the same parameter updates.)
fix: Feed schedulers with values that all ranks share: all_reduce the metric first.
detected: `ddpcheck run` compares the learning rates at each optimizer step. DDP507 is reported if they are equal at
first and differ later. A schedule that makes world_size steps at a time instead of one is reported as a warning. This
is reported only if the schedule ends too early, or if the code calls step() world_size times.
ignore: If ranks use different rates on purpose.
explains: DDP306
example:
schedule = ReduceLROnPlateau(optimizer)
schedule.step(loss)                      # the loss of this rank's samples; right: all_reduce it first

DDP508 step-skipped-on-a-rank: error
A rank skips a backward pass or an optimizer step that the others make.
why: One rank skips a step (NaN, out of memory). From then on, its gradients are silently averaged with those of a
different step on the other ranks. At the end, one rank has no steps left and the job hangs.
fix: all_reduce the decision, so that all ranks skip the step or none does.
detected: ddpcheck compares how many backward passes and optimizer steps each rank makes between two averages of
gradients, and reports differences. `ddpcheck run` also compares the numbers of forward passes and batches. If a rank
takes more batches than usual before an average, it has skipped a backward pass. Such skips are reported if at least two
ranks skip different passes. If the numbers vary much, or more than three passes in a row are skipped, nothing is
reported.
ignore: If a rank skips a step on purpose and its parameters are synchronised afterwards.
explains: DDP306
reports: NVIDIA-NeMo/Automodel#2468 ecmwf/WeatherGenerator#2718 pytorch/pytorch#64636
example:
if torch.isfinite(loss):                 # right: all_reduce the decision first
    optimizer.step()

DDP509 backward-without-forward-pairing: error
The wrapper's forward and backward passes do not come in pairs.
why: A forward prepares the reducer, and one backward finishes it. A second backward of the same forward is not reduced.
A forward without a backward leaves the reducer waiting. Several forwards and backwards must have the same order on all
ranks. (PyTorch docs, DistributedDataParallel.)
fix: Call forward once and backward once a step; add losses up before backward; use no_grad for forwards that do not
train.
detected: ddpcheck records the wrapper's forward and backward passes in order. It reports a second backward pass without
its own forward, if an optimizer uses its gradients. It also reports a second pass that makes DDP raise.
ignore: If the gradients of the second pass are only inspected, and no optimizer uses them.
explains: DDP101 DDP102 DDP103 DDP301 DDP302 DDP306 DDP406
example:
one, other = ddp(a).mean(), ddp(b).mean()
one.backward()
other.backward()                         # right: (one + other).backward()

DDP511 mode-differs: error
In a step, the model is in train mode on one rank and in eval mode on another.
why: Dropout and BatchNorm then compute different functions, and BatchNorm statistics change on some ranks only. DDP
silently averages the gradients.
fix: Call train() and eval() on every rank at the same places; evaluate on all ranks, or call train() again after it.
detected: No check reports this code today. A mode that differs between ranks is reported as DDP222.
ignore: See DDP222.
example:
if rank == 0:
    model.eval()                         # right: on every rank, and back to model.train() after it

DDP513 static-graph-violated: error, stops_ddp, by_family
static_graph=True is set, and the set of used parameters or their order changes.
why: With static_graph=True, DDP records in the first iteration how often each gradient arrives, and relies on it. If
the graph changes, the ranks hang, DDP raises, or gradients are not reduced. (PyTorch docs, DistributedDataParallel,
static_graph.)
fix: Remove static_graph=True and use find_unused_parameters=True, or make every step use the same parameters.
detected: DDP513 is reported if static_graph=True is set, and backward reaches different parameters in different steps.
It is also reported if DDP itself raises because the graph has changed.
ignore: Never. DDP relies on the first iteration.
explains: DDP306 if same subjects; DDP301 DDP302 DDP303 DDP304 DDP305 DDP312; DDP516 if only the loss
reports: pytorch/pytorch#58111 pytorch/pytorch#97030 deepinsight/insightface#2288

DDP514 accumulation-scale: error
Accumulated gradients are not scaled by the number of micro-steps, or by the number of tokens in each.
why: backward adds gradients up. Without division, the step grows with the number of micro-steps. If the last
accumulation is shorter but is divided by the same number, its step is too small. If micro-batches have unequal numbers
of tokens, their mean is a mean of means: tokens of the shorter ones count more. (huggingface/transformers#34191 fixed
this in one trainer.)
fix: Divide each micro-step's loss by the number of micro-steps of this accumulation; if micro-batches have unequal
numbers of tokens, let each loss be a sum over tokens, and divide it by the number of tokens in all micro-batches of the
accumulation.
detected: `ddpcheck report` compares the number of backward passes on a rank with the number in a single process. DDP514
is reported if the gradient is wrong by the ratio of these numbers. `ddpcheck run` reports DDP514 if the loss of each
micro-batch is a mean over this micro-batch, and nothing divides these losses by their number. It recognises
micro-batches by the batches of a loader or by no_sync. All their backward passes must come from one line. `ddpcheck
run` and `ddpcheck.watch` also measure how much each cross-entropy target counts. They report targets that count more
because their micro-batch has fewer targets.
ignore: If the learning rate was tuned with the sum, or if micro-batches should have the same weight, however many
tokens they have.
reports: huggingface/transformers#34191 huggingface/transformers#24725 meta-pytorch/torchtune#1875
example:
for part in batch.split(4):
    loss(ddp, part).backward()           # right: (loss(ddp, part) / len(batch.split(4))).backward()

DDP515 values-changed-after-wrapping: error
Something other than the optimizer changed parameter values after wrapping, on some ranks.
why: DDP broadcasts only at construction. If rank 0 alone loads a checkpoint, or re-initialises, prunes or averages
weights, only rank 0 changes. (PyTorch docs, DistributedDataParallel: parameters are never broadcast after
construction.)
fix: Make the change on every rank from the same data, or broadcast the parameters after it.
detected: ddpcheck computes checksums of the parameters when the wrapper is constructed. The ranks compare checksums
before the first forward pass and in later steps. Under fully_shard, `ddpcheck run` records the lines that write
parameters before the first forward pass. It reports lines that only some ranks have reached.
ignore: If the values are restored before the optimizer steps, as in sharpness-aware minimisation.
explains: DDP208 DDP301 DDP302 DDP303 DDP304 DDP305 DDP312 DDP306; DDP516 if only the loss
example:
ddp = DistributedDataParallel(model)
if dist.get_rank() == 0:
    model.load_state_dict(checkpoint)    # right: load before wrapping, or on every rank

DDP517 gradients-discarded: error
Gradients are zeroed or replaced before an optimizer step has used them.
why: A zero_grad between backward and step, or in every micro-step of an accumulation, discards gradients that were
computed and reduced. The model trains on a part of the batch, or not at all.
fix: Call zero_grad right after step, or right before the first micro-step, and nowhere else.
detected: ddpcheck records zero_grad, backward passes and optimizer steps in order. It reports gradients that are
repeatedly zeroed before a step has used them.
ignore: If a step is skipped on purpose, and its gradients with it.
example:
for part in parts:
    optimizer.zero_grad()                # right: once, before the loop
    loss(ddp, part).backward()

DDP520 leftover-gradients: error
A step uses gradients that existed before its own backward passes, and were never zeroed.
why: backward adds to .grad. Without zero_grad, each step uses the gradients of all steps before. In a GAN, two networks
are trained in turn. The loss of one network leaves gradients in the other. The optimizer of the other network then uses
these gradients together with its own. DDP averages all of them, so the ranks agree. (PyTorch docs,
torch.optim.Optimizer.zero_grad.)
fix: Call zero_grad of an optimizer right before the backward pass of its loss, or right after its step.
detected: `ddpcheck run` inspects one gradient of each optimizer between a step and the next backward pass. DDP520 is
reported if this gradient is still not zero, in three steps in a row, and backward adds to it.
ignore: If gradients of several losses should be added up over several steps.
example:
loss_of_generator.backward()             # reaches the discriminator too
generator_optimizer.step()
loss_of_discriminator.backward()         # right: discriminator_optimizer.zero_grad() first
discriminator_optimizer.step()

DDP522 rank-dependent-compilation: warning
On some ranks only, torch.compile compiles a function repeatedly, or to different operations.
why: One rank may compile for a tenth of a second or for minutes. Meanwhile, all others wait in the reduction of
gradients. After 8 recompilations (torch._dynamo.config.recompile_limit), torch gives up. That rank then runs the
function without compilation, slower than the others. If the code itself depends on the rank, the ranks train different
models. (PyTorch docs, torch.compile, Recompilation.)
fix: Pad batches to one shape, or compile for any size: torch.compile(dynamic=True) or torch._dynamo.mark_dynamic. Make
Python values and branches in forward the same on every rank.
detected: ddpcheck records what each rank compiles in training, and which guard (condition for reusing compiled code)
failed. `ddpcheck run`, `ddpcheck.watch` and the compiled steps of `ddpcheck report` do this. Three cases are reported.
The same guard fails at least twice on one rank and never on another. Only some ranks reach the recompile limit. For
inputs of the same shapes, a function always compiles to different operations on different ranks. Functions with graph
breaks are not compared for the third case.
ignore: If the recompilations end soon: this rank has already met all its shapes, and the others will meet theirs later.
example:
model = DistributedDataParallel(torch.compile(net, dynamic=False))
for tokens in loader:                    # lengths that vary on one rank
    model(tokens).backward()             # right: torch.compile(net), which compiles for any length at the second

DDP523 state-not-loaded: error
load_state_dict(strict=False) loads nothing, because the keys of the state have a different prefix.
why: The keys of a state taken from a DistributedDataParallel begin with 'module.'. The keys of a compiled module begin
with '_orig_mod.'. With strict=False torch loads the keys that match and ignores the others. If no key matches, training
starts from the initial values of the model. (PyTorch docs, torch.nn.Module.load_state_dict.)
fix: Take and load the state of the same module (`ddp.module` on both sides), or remove the prefix:
torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, 'module.'). Without strict=False, torch raises.
detected: `ddpcheck run` compares the keys of each loaded state with those of the module. A load is reported if no key
matches and most keys would match with a different prefix. It is not reported if a matching state is loaded before the
next optimizer step or the end of the script.
ignore: If the load does nothing on purpose.
example:
state = torch.load("checkpoint.pt")                # of ddp.state_dict(): "module.head.weight"
ddp.module.load_state_dict(state, strict=False)    # right: ddp.load_state_dict(state)
""")
