"""Findings, reports, rules, evidence, errors and wording. Imports nothing else of ddpcheck, nor torch."""
