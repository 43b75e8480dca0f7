"""Findings, reports, rules, evidence, errors and wording; independent of torch and other folders."""
