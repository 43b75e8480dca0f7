"""Reporting process of `ddpcheck run`: hang detection and judgment of the rank logs."""
