"""DDP215 buffer-overwritten: warning, takes_severity, spreads, buffers_only, stops_run

A buffer that a rank computed is discarded: the broadcast replaces it with rank 0's.

Why: In each step, DDP broadcasts rank 0's buffers at the start of forward. Statistics, counters and queues of the
    other ranks are lost. The buffer then describes rank 0's samples only. (PyTorch docs, DistributedDataParallel,
    broadcast_buffers.)
Fix: Reduce the buffer over all ranks yourself (SyncBatchNorm, or all_reduce before the update), or accept that the
    buffer describes rank 0's samples only, and ignore DDP215 for it.
Detected: After each step, the ranks compare the values of their buffers. A buffer is reported if its values differ,
    and the wrapper broadcasts rank 0's values before the next forward.
Ignore: If rank 0's samples represent the data well enough. Most people accept this for the running statistics of
    BatchNorm.
Line: The line that writes the buffer. If there is none, the line that creates the first buffer.
Checks: report wrapping, reducer; run replicas; repro buffers
Explains: DDP516 if only the loss
Reports: huggingface/pytorch-image-models#110 facebookresearch/moco#41
Example:
    def forward(self, x):
        self.seen += x.shape[0]              # right: count = torch.tensor(x.shape[0]); dist.all_reduce(count)
        return self.body(x)
"""

from __future__ import annotations

from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.rules.replicas.comparisons import judge_buffers_after_steps
from ddpcheck.trace.replicas import Changes, ReplicaFacts, buffer_writes


def judge_overwritten_buffers(facts: ReplicaFacts) -> list[Finding]:
    """DDP215: buffers that differ between ranks after a step, and that the wrapper broadcasts."""
    consequence = "the next forward overwrites {them} with rank 0's, so the values of the other ranks are discarded"
    return judge_buffers_after_steps("DDP215", facts, consequence) if facts.known.broadcasts_buffers else []


def relocate(finding: Finding, changes: Changes, _wrapped_at: Location | None) -> Finding:
    """Relocate a finding to the line that writes the buffer."""
    writes = [change for name in finding.subjects for change in buffer_writes(changes, name).values()]
    location = next((change.location for change in writes if change.location is not None), None)
    return replace(finding, location=location) if location else finding
