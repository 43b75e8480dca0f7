"""From evidence to findings: pure functions, which import `ddpcheck.findings` only, and never torch."""
