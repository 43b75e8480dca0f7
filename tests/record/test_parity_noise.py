"""What the run that measures noise changes in parameters."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import torch
from ddpcheck.record.parity.draws import Noise

noise = Noise()
before = torch.linspace(-3, 3, 64)
before[5] = 0.0
state = torch.get_rng_state()
parameter, whole, edges = before.clone().requires_grad_(), torch.arange(4), torch.full((256,), 0.5)
noise.round([parameter, whole, edges], 8)
assert torch.equal(torch.get_rng_state(), state)
assert torch.equal(whole, torch.arange(4))
apart = (parameter.detach() - before).abs()
assert 0 < apart.max() / 3 < 1e-5 and apart[5] == 0, apart
assert (apart > 0).sum() == 63
signs = (edges - 0.5).sign()  # of what is near an edge, some comes to the other side
assert (signs > 0).any() and (signs < 0).any()
"""


def test_parameters_change_in_their_last_places_only() -> None:
    subprocess.run([sys.executable, "-c", _SCRIPT], check=True, timeout=120)
